"""Operators of DTensors that are split by the rules of the domain.

They are run here rather than handed to `register_sharding`: what is registered there cannot be
taken back, which `uninstall()` promises, and it cannot change the numbers of a call, as the number
of groups that a rank has, nor add a bias on one rank only.
"""

from typing import Any

import torch

from shardcore.adapters import dtensor_views, split_losses, split_operators, torch_compat
from shardcore.adapters.dtensor_placements import settled
from shardcore.adapters.dtensor_split import brought, choose, run_split
from shardcore.adapters.torch_compat import dtensor as dtensor_compat
from shardcore.domain import operator_rules_table as table

aten = torch.ops.aten


def _unbind(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """`unbind(tensor, dim)`: DTensor does it, but for a dim that is split."""
    tensor, *rest = args
    dim = (rest[0] if rest else kwargs.get("dim", 0)) % tensor.ndim
    rule = table.unbind(tensor.ndim, dim, tensor.shape[dim])
    placements = choose(operator, rule, (tensor,)).operands[0]
    moved = brought(tensor, placements)
    slices = dtensor_compat.as_torch_does(operator, (moved, *rest), kwargs)
    if dtensor_compat.moves(tensor, moved.placements):
        dtensor_views.taken(tensor, moved.placements, dtensor_compat.local_tensor(moved))
    return slices


HANDLERS: dict[Any, torch_compat.Handler] = {
    **split_losses.handlers(run_split, settled),
    **split_operators.handlers(run_split),
    aten.unbind.int: _unbind,
}
