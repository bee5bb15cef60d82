"""Operators that look elements up, and normalizations over the last dims."""

from collections.abc import Sequence
from typing import Any

import torch

from shardcore.adapters import torch_compat
from shardcore.adapters.slices.split import run_split
from shardcore.adapters.split_operators import Parts
from shardcore.domain import operator_rules_basic as basic

aten = torch.ops.aten


def _embedding(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """`embedding(table, indices, ...)`."""
    rows, indices, *rest = args
    rule = basic.embedding(indices.ndim)
    return run_split(
        operator, rule, (rows, indices), lambda parts: (operator(*parts, *rest, **kwargs),)
    )[0]


def _embedding_backward(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """`embedding_dense_backward(gradient, indices, rows, ...)`."""
    gradient, indices, *rest = args
    rule = basic.embedding_backward(indices.ndim)
    return run_split(
        operator, rule, (gradient, indices), lambda parts: (operator(*parts, *rest, **kwargs),)
    )[0]


def _layer_norm(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """`native_layer_norm(input, shape, weight, bias, eps)`."""
    x, shape, weight, bias, eps = args
    given = [each for each in (weight, bias) if each is not None]
    rule = basic.layer_norm(x.ndim - len(shape), len(shape), len(given))

    def call(parts: Parts) -> Sequence[torch.Tensor]:
        part, *rest = parts
        local = iter(rest)
        w = None if weight is None else next(local)
        b = None if bias is None else next(local)
        return torch_compat.as_tuple(operator(part, shape, w, b, eps))

    return run_split(operator, rule, (x, *given), call)


def _layer_norm_backward(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """`native_layer_norm_backward(gradient, input, shape, mean, rstd, weight, bias, mask)`."""
    gradient, x, shape, mean, deviation, weight, bias, mask = args
    given = [each for each in (weight, bias) if each is not None]
    rule = basic.layer_norm_backward(x.ndim - len(shape), len(shape), len(given))

    def call(parts: Parts) -> Sequence[torch.Tensor | None]:
        grad, part, m, d, *rest = parts
        local = iter(rest)
        w = None if weight is None else next(local)
        b = None if bias is None else next(local)
        found = operator(grad, part, shape, m, d, w, b, mask)
        return [each if wanted else None for each, wanted in zip(found, mask, strict=True)]

    return run_split(operator, rule, (gradient, x, mean, deviation, *given), call)


def _taken(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """`index_select(tensor, dim, indices)`."""
    tensor, dim, indices = args
    rule = basic.taken(tensor.ndim, dim % tensor.ndim)
    return run_split(
        operator, rule, (tensor, indices), lambda parts: (operator(parts[0], dim, parts[1]),)
    )[0]


def _looked_up(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """`gather(tensor, dim, index)`."""
    tensor, dim, index = args[:3]
    rule = basic.looked_up(tuple(tensor.shape), tuple(index.shape), dim % tensor.ndim)
    return run_split(
        operator, rule, (tensor, index), lambda parts: (operator(parts[0], dim, parts[1]),)
    )[0]


HANDLERS: dict[Any, torch_compat.Handler] = {
    aten.embedding.default: _embedding,
    aten.embedding_dense_backward.default: _embedding_backward,
    aten.native_layer_norm.default: _layer_norm,
    aten.native_layer_norm_backward.default: _layer_norm_backward,
    aten.index_select.default: _taken,
    aten.gather.default: _looked_up,
}
