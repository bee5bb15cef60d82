"""Products of matrices: the contracted dim may be split, which leaves a pending sum."""

from collections.abc import Sequence
from typing import Any

import torch

from shardcore.adapters import torch_compat
from shardcore.adapters.slices.split import run_split
from shardcore.adapters.split_operators import Parts
from shardcore.domain import operator_rules_basic as basic
from shardcore.domain.operator_rules import OperatorRule

aten = torch.ops.aten


def _product(operands: str, result: str) -> torch_compat.Handler:
    rule = basic.product(operands, result)

    def handle(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        left, right = args[:2]
        shape = _product_shape(rule, left, right)
        (found,) = run_split(
            operator, rule, (left, right), lambda parts: (operator(*parts, **kwargs),), (shape,)
        )
        return found

    return handle


def _product_shape(rule: OperatorRule, left: torch.Tensor, right: torch.Tensor) -> tuple[int, ...]:
    sizes = {
        dim.factor: size
        for term, tensor in zip(rule.operands, (left, right), strict=False)
        for dim, size in zip(term.dims, tensor.shape, strict=True)
    }
    return tuple(sizes[dim.factor] for dim in rule.results[0].dims)


def _product_and_sum(operands: str, result: str) -> torch_compat.Handler:
    plain = basic.product(operands, result)

    def handle(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        added, left, right = args
        shape = _product_shape(plain, left, right)
        dims = result.split()[len(shape) - added.ndim :]
        sizes = shape[len(shape) - added.ndim :]
        text = " ".join(
            dim if size == whole else "-"
            for dim, size, whole in zip(dims, added.shape, sizes, strict=True)
        )
        rule = basic.product(operands, result, added=text)

        def call(parts: Parts) -> Sequence[torch.Tensor]:
            return (operator(parts[2], parts[0], parts[1], **kwargs),)

        return run_split(operator, rule, (left, right, added), call, (shape,))[0]

    return handle


HANDLERS: dict[Any, torch_compat.Handler] = {
    aten.mm.default: _product("n k, k m", "n m"),
    aten.bmm.default: _product("b n k, b k m", "b n m"),
    aten.mv.default: _product("n k, k", "n"),
    aten.dot.default: _product("k, k", ""),
    aten.addmm.default: _product_and_sum("n k, k m", "n m"),
    aten.baddbmm.default: _product_and_sum("b n k, b k m", "b n m"),
}
