"""Linear operators: products of matrices, and Fourier transforms.

The contracted dim of a product may be sharded, which leaves a partial sum.
"""

from collections.abc import Sequence
from math import prod
from typing import Any

import attrs
import torch

from shardcore.adapters.engine.operators.views import along, one_result
from shardcore.adapters.engine.task import Handler, Operand, Operator, Planner, Task, by_operator
from shardcore.adapters.torch_private import unnamed_operators
from shardcore.domain.engine.rules import basic, movement
from shardcore.domain.engine.rules.rule import fits


def _product(operands: str, result: str) -> Planner:
    """Plans a product of the last two tensors of a call; one before them is added."""

    def plan(_operator: Operator, *args: object, **_kwargs: object) -> Task | None:
        given = [arg for arg in args if isinstance(arg, Operand)]
        rule, shape = basic.product(operands, result, *(operand.shape for operand in given))
        if not all(fits(added.shape, shape) for added in given[:-2]):
            return None  # torch's error names the shapes of full operands
        linear_in = () if given[2:] else _linear_in(given, shape)
        return Task(rule, given, result_shapes=(shape,), linear_in=linear_in)

    return plan


def _linear_in(operands: Sequence[Operand], shape: tuple[int, ...]) -> list[int]:
    """Finds the operands that are multiplied before they are reduced, as gradients are.

    The gradient of a weight is reduced with others, at the end of the backward pass. A product
    with a weight stays partial if it is no larger.
    """
    with_weight = any(operand.form.weight for operand in operands)
    return [
        position
        for position, operand in enumerate(operands)
        if not with_weight or prod(shape) <= operand.numel()
    ]


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
    **by_operator(
        {
            "mm addmm": _product("n k, k m", "n m"),
            "bmm baddbmm": _product("b n k, b k m", "b n m"),
            "mv": _product("n k, k", "n"),
            "dot": _product("k, k", ""),
            "view_as_real": _as_real,
            "view_as_complex": _as_complex,
        }
    ),
}
HANDLERS: dict[Any, Handler] = {unnamed_operators.CONJUGATE: _conjugate}
