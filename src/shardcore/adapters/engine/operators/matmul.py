"""Products of matrices: the contracted dim may be sharded, which leaves a partial sum."""

from collections.abc import Sequence
from math import prod
from typing import Any

from shardcore.adapters.engine.task import Operand, Operator, Planner, Task, by_operator
from shardcore.domain.engine.rules import basic
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


PLANNERS: dict[Any, Planner] = by_operator(
    {
        "mm addmm": _product("n k, k m", "n m"),
        "bmm baddbmm": _product("b n k, b k m", "b n m"),
        "mv": _product("n k, k", "n"),
        "dot": _product("k, k", ""),
    }
)
