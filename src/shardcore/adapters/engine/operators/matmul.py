"""Products of matrices: the contracted dim may be split, which leaves a pending sum."""

from math import prod
from typing import Any

import torch

from shardcore.adapters.engine.planned import Operand, Task
from shardcore.adapters.engine.registry import Planner
from shardcore.domain import operator_rules_basic as basic
from shardcore.domain.operator_rules import OperatorRule

aten = torch.ops.aten


def _product(operands: str, result: str) -> Planner:
    rule = basic.product(operands, result)

    def plan(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Task:
        left, right = args[:2]
        shape = _product_shape(rule, left, right)
        return Task(
            rule, (left, right), result_shapes=(shape,), linear_in=_linear_in((left, right), shape)
        )

    return plan


def _linear_in(operands: tuple[Operand, Operand], shape: tuple[int, ...]) -> list[int]:
    """The operands that are multiplied before they are summed, as a gradient on its way back.

    That of a weight is summed with others, at the end of the backward pass. A product with a
    weight stays pending where it is no larger.
    """
    with_weight = any(each.form.weight for each in operands)
    return [
        place
        for place, each in enumerate(operands)
        if not with_weight or prod(shape) <= each.numel()
    ]


def _product_shape(rule: OperatorRule, left: Operand, right: Operand) -> tuple[int, ...]:
    sizes = {
        dim.factor: size
        for term, operand in zip(rule.operands, (left, right), strict=False)
        for dim, size in zip(term.dims, operand.shape, strict=True)
    }
    return tuple(sizes[dim.factor] for dim in rule.results[0].dims)


def _product_and_sum(operands: str, result: str) -> Planner:
    plain = basic.product(operands, result)

    def plan(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Task:
        added, left, right = args
        shape = _product_shape(plain, left, right)
        dims = result.split()[len(shape) - added.ndim :]
        sizes = shape[len(shape) - added.ndim :]
        text = " ".join(
            dim if size == full else "-"
            for dim, size, full in zip(dims, added.shape, sizes, strict=True)
        )
        return Task(
            basic.product(operands, result, added=text),
            (left, right, added),
            lambda parts: (operator(parts[2], parts[0], parts[1], **kwargs),),
            (shape,),
        )

    return plan


PLANNERS: dict[Any, Planner] = {
    aten.mm.default: _product("n k, k m", "n m"),
    aten.bmm.default: _product("b n k, b k m", "b n m"),
    aten.mv.default: _product("n k, k", "n"),
    aten.dot.default: _product("k, k", ""),
    aten.addmm.default: _product_and_sum("n k, k m", "n m"),
    aten.baddbmm.default: _product_and_sum("b n k, b k m", "b n m"),
}
