"""Operators that look elements up, and layer norms."""

from collections.abc import Sequence
from typing import Any

import torch

from shardcore.adapters.engine.operators.lookup.losses import places
from shardcore.adapters.engine.plans.planning import run_rule
from shardcore.adapters.engine.plans.task import Handler, Operand, Parts, Planner, Task, order_of
from shardcore.domain.rules import basic, lookups

aten = torch.ops.aten


def _embedding(_operator: Any, table: Operand, indices: Operand, *_rest: Any) -> Task | Handler:
    """Plans `embedding`, whose further operands are for the gradient."""
    if table.is_split(0) and not _splits(indices, table.form.layout.dim_axes(0)):
        return _own_rows
    return Task(lookups.index(2, 0, 1, indices.ndim), (table, indices))


def _splits(indices: Operand, axes: Sequence[str]) -> bool:
    """Returns whether one of `axes` splits `indices`, so that ranks look up different rows."""
    layout = indices.form.layout
    return layout.without(*axes) != layout


def _own_rows(operator: Any, table: Any, indices: Any, *_rest: Any) -> Any:
    """Runs an embedding with split rows: the found rows, else zeros, are a partial sum."""
    numbers = torch.arange(len(table), device=table.device)

    def compute(parts: Parts) -> Sequence[torch.Tensor]:
        rows, wanted, own = parts
        here, place = places(wanted, own)
        return (operator(rows, place).masked_fill(~here.unsqueeze(-1), 0),)

    rule = lookups.embedding_of_rows(indices.ndim)
    shape = (*indices.shape, *table.shape[1:])
    return run_rule(operator, rule, (table, indices, numbers), compute, (shape,))[0]


def _embedding_backward(
    _operator: Any, gradient: Operand, indices: Operand, *numbers: Any
) -> Task | None:
    _rows, _padding, by_frequency = numbers
    if by_frequency:
        return None  # all ranks need the number of reads of a row
    return Task(lookups.embedding_backward(indices.ndim), (gradient, indices), linear_in=(0,))


def _layer_norm(_operator: Any, x: Operand, shape: Sequence[int], *args: Any) -> Task:
    given = [each for each in args if isinstance(each, Operand)]  # weight and bias
    rule = basic.layer_norm(x.ndim - len(shape), len(shape), len(given))
    return Task(rule, (x, *given), orders=[order_of(x)])


def _layer_norm_backward(
    _operator: Any, gradient: Operand, x: Operand, shape: Sequence[int], *args: Any
) -> Task:
    # Mean and deviation; weight and bias, if they are given.
    moments_and_given = [each for each in args if isinstance(each, Operand)]
    given = len(moments_and_given) - 2
    rule = basic.layer_norm_backward(x.ndim - len(shape), len(shape), given)
    return Task(rule, (gradient, x, *moments_and_given))


def _index_select(_operator: Any, tensor: Operand, dim: int, indices: Operand) -> Task:
    return Task(lookups.index(tensor.ndim, dim % tensor.ndim, 1, 1), (tensor, indices))


def _bucketize(_operator: Any, tensor: Any, boundaries: Operand, **_kwargs: Any) -> Task | None:
    """Plans `bucketize`, which needs all boundaries for each number."""
    if not isinstance(tensor, Operand):
        return None
    return Task(lookups.searchsorted(tensor.ndim), (tensor, boundaries))


def _gather(_operator: Any, tensor: Operand, dim: int, *args: Any, **_kwargs: Any) -> Task | None:
    """Plans `gather(tensor, dim, index)`, `scatter(tensor, dim, index, source)`, `scatter_add`."""
    operands = [tensor, *(each for each in args if isinstance(each, Operand))]
    if not all(each.ndim for each in operands):
        return None
    return Task(lookups.gather(dim % tensor.ndim, *(each.shape for each in operands)), operands)


PLANNERS: dict[Any, Planner] = {
    aten.bucketize.Tensor: _bucketize,
    aten.embedding.default: _embedding,
    aten.embedding_dense_backward.default: _embedding_backward,
    aten.native_layer_norm.default: _layer_norm,
    aten.native_layer_norm_backward.default: _layer_norm_backward,
    aten.index_select.default: _index_select,
    aten.gather.default: _gather,
    aten.scatter.src: _gather,
    aten.scatter.value: _gather,
    aten.scatter_add.default: _gather,
}
