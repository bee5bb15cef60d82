"""DTensors: promotion, and placements."""

from typing import cast

import torch
from torch.distributed.device_mesh import DeviceMesh
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


def writes_into(tensor: torch.Tensor) -> int:
    """How often torch has seen a write into the memory of the plain `tensor`.

    torch 2.13: the counter has no public name.
    """
    return int(tensor._version)


def local_tensor(tensor: DTensor) -> torch.Tensor:
    """What this rank stores, without a word to autograd."""
    local: torch.Tensor = tensor._local_tensor
    return local
