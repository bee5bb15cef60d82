"""`argmax` along a split dim, as of logits whose classes are split: they stay where they lie.

Known for torch 2.13, where DTensor gathers them.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Partial, Placement, Replicate, Shard

from shardcore.adapters import split_argmax, torch_compat
from shardcore.adapters.dtensor_placements import settled, splits
from shardcore.adapters.dtensor_trust import HANDLERS as TRUSTED
from shardcore.adapters.torch_compat import dtensor as dtensor_compat

aten = torch.ops.aten


def _argmax(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """`argmax(x, dim, keepdim)`: each rank tells of its part, in one all-reduce."""
    x, dim, keep = (*args, None, False)[:3] if len(args) < 3 else args
    if kwargs or dim is None or not _is_served(x, dim % max(x.ndim, 1)):
        return TRUSTED[operator](operator, args, kwargs)
    with torch.no_grad():
        places = _places(settled(x), dim % x.ndim)
        return places if keep else places.squeeze(dim)


def _is_served(x: Any, dim: int) -> bool:
    along = [each for each in x.placements if splits(each, dim)]
    return bool(along) and all(p.is_shard(dim) for p in along) and x.dtype in split_argmax.SERVED


def _places(x: DTensor, dim: int) -> DTensor:
    told = split_argmax.packed(dtensor_compat.local_tensor(x), _numbers(x, dim), dim)
    pending = [Partial("max") if splits(each, dim) else each for each in x.placements]
    largest = settled(_row_by_row(told, x, dim, pending))
    found = split_argmax.places(largest.to_local())
    return _row_by_row(found, x, dim, largest.placements)


def _numbers(x: DTensor, dim: int) -> torch.Tensor:
    """Where along the whole `dim` the values are that this rank has."""
    mesh = x.device_mesh
    every = torch.arange(x.shape[dim], device=dtensor_compat.local_tensor(x).device)
    whole = DTensor.from_local(every, mesh, [Replicate()] * mesh.ndim, run_check=False)
    placements = [Shard(0) if splits(each, dim) else Replicate() for each in x.placements]
    return whole.redistribute(placements=placements).to_local()


def _row_by_row(
    part: torch.Tensor, x: DTensor, dim: int, placements: Sequence[Placement]
) -> DTensor:
    """This rank's part of what has one entry along `dim`, and is else as large as `x`."""
    shape = torch.Size((*x.shape[:dim], 1, *x.shape[dim + 1 :]))
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(
        part.contiguous(), x.device_mesh, placements, run_check=False, shape=shape, stride=stride
    )


HANDLERS: dict[Any, torch_compat.Handler] = {aten.argmax.default: _argmax}
