"""Tensors: promotion, placements, views, and the store of the job."""

from typing import Any, cast

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import PrefixStore, Store, _get_default_store
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec, ShardOrderEntry
from torch.distributed.tensor.placement_types import Placement

from shardcore.domain.layout import ShardOrder
from shardcore.domain.mesh import Mesh


def set_promotion(enabled: bool) -> bool:
    """Switch the promotion of plain tensors for this thread; gives what it was before.

    torch 2.13: the public `implicit_replication()` is not nestable, it leaves with False.
    """
    before: bool = torch._C._get_dtensor_allow_implicit_replication()
    torch._C._set_dtensor_allow_implicit_replication(enabled)
    return before


def ordered_placements(
    placements: tuple[Placement, ...], order: ShardOrder, mesh: Mesh
) -> tuple[Placement, ...]:
    """`placements` such that the dims in `order` are split in that order of axes.

    torch 2.13: an order other than that of the mesh axes is said by `_StridedShard`, which has
    no public constructor for it.
    """
    for dim, axes in order:
        entry = ShardOrderEntry(tensor_dim=dim, mesh_dims=tuple(map(mesh.axis_index, axes)))
        placements = DTensorSpec._convert_shard_order_to_StridedShard(
            (entry,), placements, cast(DeviceMesh, _Sizes(mesh))
        )
    return placements


def plain_placements(tensor: DTensor, mesh: Mesh) -> tuple[tuple[Placement, ...], ShardOrder]:
    """The placements of `tensor` without `_StridedShard`, and the order that it stood for."""
    placements, order = DTensorSpec._normalize_placements_into_shard_order(
        tuple(tensor.placements), tensor.device_mesh
    )
    named = tuple(
        (entry.tensor_dim, tuple(mesh.axis_names[i] for i in entry.mesh_dims)) for entry in order
    )
    return placements, named


class _Sizes:
    """What `_convert_shard_order_to_StridedShard` reads of a mesh."""

    def __init__(self, mesh: Mesh) -> None:
        self._shape = mesh.shape

    def size(self, axis: int) -> int:
        return self._shape[axis]


def base_of(tensor: DTensor) -> DTensor | None:
    """The sharded tensor that `tensor` is a view of; None if it is no view of one.

    torch 2.13: `_is_view` and `_base` are the only way to ask autograd.
    """
    base = tensor._base if tensor._is_view() else None
    return base if isinstance(base, DTensor) else None


def same_view(view: DTensor, base: torch.Tensor) -> torch.Tensor:
    """What `view` is of its base, of another base.

    torch 2.13: `_view_func` asks first whether both bases are of one size, which fails for a
    DTensor and a plain tensor.
    """
    result: torch.Tensor = view._view_func_unsafe(base)
    return result


def local_tensor(tensor: DTensor) -> torch.Tensor:
    """What this rank stores, without a word to autograd."""
    local: torch.Tensor = tensor._local_tensor
    return local


def store_for_thread(prefix: str) -> Store:
    """A connection of its own to the store of the default group, its keys under `prefix`.

    torch 1.13 to 2.13: `distributed_c10d._get_default_store` has no public counterpart, and a
    store of our own would need a second address. A wait on a shared connection blocks every
    other thread; `clone` makes another.
    """
    store: Any = _get_default_store()  # the stubs of torch do not know `clone`
    return PrefixStore(prefix, store.clone())
