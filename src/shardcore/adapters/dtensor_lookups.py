"""Rows of a table that is split by rows: each rank gives those that it has, as a part of a sum.

DTensor 2.13 leaves a sum pending of a kind that can be reduced once only, over one axis, and not
scattered; its second use asserts.
"""

from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Partial, Placement, Replicate

from shardcore.adapters import torch_compat
from shardcore.adapters.dtensor_placements import is_pending, settled, splits
from shardcore.adapters.dtensor_trust import replicated, run_whole
from shardcore.adapters.torch_compat import dtensor as dtensor_compat

aten = torch.ops.aten


def _embedding(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """`embedding(table, indices, ...)`, whose further operands are for the gradient."""
    table, indices = args[:2]
    busy = _busy(table)
    by_rows = [axis for axis, placement in busy.items() if splits(placement, 0)]
    if len(by_rows) > 1:
        return run_whole(operator, args, kwargs)
    with torch.no_grad():
        if len(busy) == 1 and by_rows and _takes(busy[by_rows[0]], by_rows[0], indices):
            return _own_rows(operator, table, indices, by_rows[0])
        return settled(dtensor_compat.as_torch_does(operator, args, kwargs))


def _takes(rows: Placement, axis: int, indices: torch.Tensor) -> bool:
    """Whether all ranks of `axis` have the same `indices`; a reshape may leave rows in strides."""
    return rows.is_shard(0) and axis not in _busy(indices) and not is_pending(indices)


def _own_rows(operator: Any, table: DTensor, indices: torch.Tensor, axis: int) -> DTensor:
    """The rows that this rank has; nothing in the places of the others."""
    part, mesh = dtensor_compat.local_tensor(table), table.device_mesh
    if not isinstance(indices, DTensor):
        indices = replicated(indices, mesh)
    longest = -(-len(table) // mesh.size(axis))
    places = dtensor_compat.local_tensor(indices) - mesh.get_local_rank(axis) * longest
    foreign = (places < 0) | (places >= len(part))
    known = part if len(part) else part.new_zeros(1, *part.shape[1:])
    rows = operator(known, places.masked_fill(foreign, 0)).masked_fill(foreign.unsqueeze(-1), 0)
    shape = torch.Size((*indices.shape, *table.shape[1:]))
    placements = list(indices.placements)
    placements[axis] = Partial()
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(rows, mesh, placements, run_check=False, shape=shape, stride=stride)


def _busy(tensor: torch.Tensor) -> dict[int, Placement]:
    """What the axes of several ranks do to `tensor`, but for those that replicate it."""
    if not isinstance(tensor, DTensor):
        return {}
    pairs = enumerate(zip(tensor.device_mesh.shape, tensor.placements, strict=True))
    return {
        axis: placement
        for axis, (size, placement) in pairs
        if size > 1 and not isinstance(placement, Replicate)
    }


HANDLERS: dict[Any, torch_compat.Handler] = {aten.embedding.default: _embedding}
