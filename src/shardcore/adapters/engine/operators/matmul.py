"""Products of matrices: the contracted dim may be split, which leaves a partial sum."""

from math import prod
from typing import Any

from shardcore.adapters.engine.plans.task import Operand, Operator, Planner, Task, by_operator
from shardcore.domain.rules.rule import rule


def _product(operands: str, result: str) -> Planner:
    """Plans a product of the last two tensors of a call; one before them is added."""

    def plan(_operator: Operator, *args: object, **_kwargs: object) -> Task:
        *added, left, right = (each for each in args if isinstance(each, Operand))
        sizes = dict(
            zip(operands.replace(",", " ").split(), (*left.shape, *right.shape), strict=True)
        )
        dims = result.split()
        shape = tuple(sizes[dim] for dim in dims)
        terms = [f"+ {_met(each, dims, shape)}, " for each in added]
        return Task(
            rule(f"{''.join(terms)}{operands} -> {result or '()'}"),
            (*added, left, right),
            result_shapes=(shape,),
            linear_in=() if added else _linear_in((left, right), shape),
        )

    return plan


def _linear_in(operands: tuple[Operand, Operand], shape: tuple[int, ...]) -> list[int]:
    """Returns the operands that are multiplied before they are reduced, as gradients are.

    The gradient of a weight is reduced with others, at the end of the backward pass. A product
    with a weight stays partial if it is no larger.
    """
    with_weight = any(each.form.weight for each in operands)
    return [
        place
        for place, each in enumerate(operands)
        if not with_weight or prod(shape) <= each.numel()
    ]


def _met(added: Operand, dims: list[str], shape: tuple[int, ...]) -> str:
    """Returns the dims of a tensor that is added to a product of `shape`, "-" if broadcast."""
    new = len(shape) - added.ndim
    meets = zip(dims[new:], added.shape, shape[new:], strict=True)
    return " ".join(dim if size == full else "-" for dim, size, full in meets) or "()"


PLANNERS: dict[Any, Planner] = by_operator(
    {
        "mm addmm": _product("n k, k m", "n m"),
        "bmm baddbmm": _product("b n k, b k m", "b n m"),
        "mv": _product("n k, k", "n"),
        "dot": _product("k, k", ""),
    }
)
