"""Operators that look up elements, rows and the classes of samples; layer norms.

For losses, a mean over weighted samples is no mean of the ranks' means: the sum and the total
weight are each reduced over the ranks, then divided. If classes are sharded, each rank looks up its
own classes, and a sample with another class adds zero. A sample with an invalid class gives nan.
One device raises an error for it, for which a rank would have to read the values.
"""

from collections.abc import Sequence
from typing import Any

import torch

from shardcore.adapters.engine.plan import run_rule
from shardcore.adapters.engine.redistribution import reduced
from shardcore.adapters.engine.task import (
    Handler,
    Operand,
    Parts,
    Planner,
    Task,
    by_operator,
    order_of,
)
from shardcore.adapters.engine.tensor import ShardedTensor
from shardcore.adapters.torch_private import unnamed_operators
from shardcore.adapters.torch_private.operators import Operator
from shardcore.domain.engine.rules import basic, lookups

# torch's numbers for `reduction=`.
_NONE, _MEAN, _SUM = 0, 1, 2


def _embedding(_operator: Operator, table: Operand, indices: Operand, *_: object) -> Task | Handler:
    """Plans `embedding`, whose further operands are for the gradient."""
    layout, axes = indices.form.layout, table.form.layout.dim_axes(0)
    # If an axis shards both, the ranks look up different rows.
    if table.is_sharded(0) and layout.without(*axes) == layout:
        return _own_rows
    return Task(lookups.index(2, 0, 1, indices.ndim), (table, indices))


def _own_rows(
    operator: Operator, table: ShardedTensor, indices: torch.Tensor, *_rest: object
) -> Any:
    """Runs an embedding with sharded rows: the found rows, else zeros, are a partial sum."""
    numbers = torch.arange(len(table), device=table.device)

    def compute(parts: Parts) -> Sequence[torch.Tensor]:
        rows, wanted, own = parts
        is_here, index = _find_in(wanted, own)
        return (operator(rows, index).masked_fill(~is_here.unsqueeze(-1), 0),)

    rule = lookups.embedding_of_rows(indices.ndim)
    shape = (*indices.shape, *table.shape[1:])
    return run_rule(operator, rule, (table, indices, numbers), compute, (shape,))[0]


def _embedding_backward(
    _operator: Operator, gradient: Operand, indices: Operand, *numbers: object
) -> Task | None:
    _rows, _padding, by_frequency = numbers
    if by_frequency:
        return None  # all ranks need the number of reads of a row
    return Task(lookups.embedding_backward(indices.ndim), (gradient, indices), linear_in=(0,))


def _layer_norm(_operator: Operator, x: Operand, shape: Sequence[int], *args: object) -> Task:
    given = [arg for arg in args if isinstance(arg, Operand)]  # weight and bias
    rule = basic.layer_norm(x.ndim - len(shape), len(shape), len(given))
    return Task(rule, (x, *given), orders=[order_of(x)])


def _layer_norm_backward(
    operator: Operator, gradient: Operand, x: Operand, shape: Sequence[int], *args: object
) -> Task:
    # Mean and deviation, or the root of the mean square; weight and bias, if they are given.
    moments_and_given = [arg for arg in args if isinstance(arg, Operand)]
    moments = 1 if operator is unnamed_operators.RMS_NORM_BACKWARD else 2
    given = len(moments_and_given) - moments
    rule = basic.layer_norm_backward(x.ndim - len(shape), len(shape), given, moments)
    return Task(rule, (gradient, x, *moments_and_given))


def _index_select(_operator: Operator, tensor: Operand, dim: int, indices: Operand) -> Task:
    return Task(lookups.index(tensor.ndim, dim % tensor.ndim, 1, 1), (tensor, indices))


def _bucketize(
    _operator: Operator, tensor: Operand | float, boundaries: Operand, **_kwargs: object
) -> Task | None:
    """Plans `bucketize`, which needs all boundaries for each number."""
    if not isinstance(tensor, Operand):
        return None
    return Task(lookups.searchsorted(tensor.ndim), (tensor, boundaries))


def _gather(
    _operator: Operator, tensor: Operand, dim: int, *args: object, **_kwargs: object
) -> Task | None:
    """Plans `gather(tensor, dim, index)`, `scatter(tensor, dim, index, source)`, `scatter_add`."""
    operands = [tensor, *(arg for arg in args if isinstance(arg, Operand))]
    if not all(operand.ndim for operand in operands):
        return None
    return Task(
        lookups.gather(dim % tensor.ndim, *(operand.shape for operand in operands)), operands
    )


def _nll_loss(
    operator: Operator,
    inputs: torch.Tensor,
    target: torch.Tensor,
    weight: torch.Tensor | None,
    reduction: int,
    ignored: int,
) -> Any:
    local = _NONE if reduction == _NONE else _SUM
    sums = (() if local == _SUM else tuple(target.shape), ())

    def call(parts: Parts) -> Sequence[torch.Tensor]:
        x, classes, *weights = parts
        outputs: Sequence[torch.Tensor] = operator(
            x, classes, weights[0] if weights else None, local, ignored
        )
        return outputs

    def call_on_classes(parts: Parts) -> Sequence[torch.Tensor]:
        x, classes, numbers, *weights = parts
        is_here, index = _find_in(classes, numbers)
        counts = classes != ignored
        losses = -x.gather(1, index.unsqueeze(1)).squeeze(1)
        own = counts.to(x.dtype)
        if weights:
            losses = losses * weights[0][index]
            own = weights[0][index].where(is_here & counts, 0)
        unknown = counts & ((classes < 0) | (classes >= inputs.shape[1]))
        losses = losses.where(is_here & counts, 0).masked_fill(unknown, torch.nan)
        return (losses if local == _NONE else losses.sum(), own.sum())

    numbers, weights = _numbers(inputs), [] if weight is None else [weight]
    rule = lookups.nll_loss(inputs.ndim, weight is not None, local == _SUM, bool(numbers))
    operands = [inputs, target, *numbers, *weights]
    compute = call_on_classes if numbers else call
    loss, total = run_rule(operator, rule, operands, compute, sums)
    with torch.no_grad():
        # The gradient divides by it, on every rank. If losses are not reduced, it is zero.
        total = reduced(total) if local == _SUM else total.new_zeros(())
        return (loss / total if reduction == _MEAN else loss), total


def _nll_loss_backward(
    operator: Operator,
    gradient: torch.Tensor,
    inputs: torch.Tensor,
    target: torch.Tensor,
    weight: torch.Tensor | None,
    reduction: int,
    ignored: int,
    total: torch.Tensor,
) -> Any:
    def call(parts: Parts) -> Sequence[torch.Tensor]:
        grad, x, classes, full_total, *weights = parts
        own = weights[0] if weights else None
        return (operator(grad, x, classes, own, reduction, ignored, full_total),)

    def call_on_classes(parts: Parts) -> Sequence[torch.Tensor]:
        grad, x, classes, full_total, numbers, *weights = parts
        row_grad = grad / full_total if reduction == _MEAN else grad
        is_here, index = _find_in(classes, numbers)
        row_grad = -row_grad * weights[0][index] if weights else -row_grad
        row_grad = row_grad.where(is_here & (classes != ignored), 0).to(x.dtype)
        return (torch.zeros_like(x).scatter_(1, index.unsqueeze(1), row_grad.unsqueeze(1)),)

    numbers, weights = _numbers(inputs), [] if weight is None else [weight]
    is_reduced = reduction != _NONE
    rule = lookups.nll_loss_backward(inputs.ndim, weight is not None, is_reduced, bool(numbers))
    operands = [gradient, inputs, target, total, *numbers, *weights]
    return run_rule(operator, rule, operands, call_on_classes if numbers else call)[0]


def _find_in(wanted: torch.Tensor, numbers: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Tells whether each of `wanted` is in the sorted `numbers`, and its index, arbitrary if not.

    A rank has several pieces of a dim that is sharded within its segments.
    """
    index = torch.searchsorted(numbers, wanted.to(numbers.dtype)).clamp(max=len(numbers) - 1)
    return numbers[index] == wanted, index


def _numbers(inputs: torch.Tensor) -> list[torch.Tensor]:
    """Numbers the classes, sharded as these; nothing if they are replicated."""
    if not isinstance(inputs, ShardedTensor) or inputs.ndim == 1:
        return []
    is_sharded = inputs.form.layout.dim_axes(1)
    return [torch.arange(inputs.shape[1], device=inputs.device)] if is_sharded else []


PLANNERS: dict[Any, Planner] = {
    unnamed_operators.RMS_NORM_BACKWARD: _layer_norm_backward,
    **by_operator(
        {
            "bucketize.Tensor": _bucketize,
            "embedding": _embedding,
            "embedding_dense_backward": _embedding_backward,
            "native_layer_norm": _layer_norm,
            "native_layer_norm_backward": _layer_norm_backward,
            "index_select": _index_select,
            "gather scatter.src scatter.value scatter_add": _gather,
        }
    ),
}
HANDLERS: dict[Any, Handler] = by_operator(
    {
        "nll_loss_forward nll_loss2d_forward": _nll_loss,
        "nll_loss_backward nll_loss2d_backward": _nll_loss_backward,
    }
)
