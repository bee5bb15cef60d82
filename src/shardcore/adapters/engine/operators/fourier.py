"""Fourier transforms, and complex numbers as pairs of real ones."""

from collections.abc import Sequence
from typing import Any

import attrs
import torch

from shardcore.adapters.engine.operators.views import along, one_result
from shardcore.adapters.engine.task import Handler, Operand, Operator, Planner, Task, by_operator
from shardcore.adapters.torch_private import unnamed_operators
from shardcore.domain.engine.rules import movement


def _transform(operator: Operator, tensor: Operand, dims: Sequence[int], *_: object) -> Task:
    """Plans a transform along `dims`, which are not sharded."""
    task = along(operator, [tensor], frozenset(dim % tensor.ndim for dim in dims))
    return attrs.evolve(task, linear_in=(0,))


def _conjugate(_operator: Operator, tensor: torch.Tensor) -> Any:
    """Runs `conj` at once: torch conjugates its view above the engine, where it is read."""
    return torch.conj_physical(tensor)


def _as_real(operator: Operator, tensor: Operand) -> Task:
    """Plans `view_as_real`: the last dim has the two parts."""
    rule = movement.permute(tensor.ndim, [*range(tensor.ndim), None])
    return one_result(rule, tensor, operator)


def _as_complex(operator: Operator, tensor: Operand) -> Task:
    """Plans `view_as_complex`, which takes pairs that are next to each other in memory."""
    rule = movement.permute(tensor.ndim, range(tensor.ndim - 1))
    return one_result(rule, tensor, lambda part: operator(_in_pairs(part)))


def _in_pairs(part: torch.Tensor) -> torch.Tensor:
    return part if part.stride(-1) == 1 else part.contiguous()


PLANNERS: dict[Any, Planner] = {
    **dict.fromkeys(unnamed_operators.TRANSFORMS, _transform),
    **by_operator({"view_as_real": _as_real, "view_as_complex": _as_complex}),
}
HANDLERS: dict[Any, Handler] = {unnamed_operators.CONJUGATE: _conjugate}
