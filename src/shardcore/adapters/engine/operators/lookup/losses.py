"""Losses that look up the class of each sample, split by `domain.rules.losses`.

A mean over weighted samples is no mean of the ranks' means: the sum and the total weight are each
reduced over the ranks, then divided. If classes are split, each rank looks up its own classes, and
a sample with another class adds zero. A sample with an invalid class gives nan. One device raises
an error for it, for which a rank would have to read the values.
"""

from collections.abc import Sequence
from typing import Any

import torch

from shardcore.adapters.engine.moves.redistribution import reduced
from shardcore.adapters.engine.plans.planning import run_rule
from shardcore.adapters.engine.plans.task import Handler, Parts
from shardcore.adapters.engine.tensor import ShardedTensor
from shardcore.domain.rules import losses as rules

aten = torch.ops.aten

# torch's numbers for `reduction=`.
_NONE, _MEAN, _SUM = 0, 1, 2


def _nll_loss(
    operator: Any, inputs: Any, target: Any, weight: Any, reduction: int, ignored: int
) -> Any:
    """Plans the loss and the total weight."""
    local = _NONE if reduction == _NONE else _SUM
    sums = (() if local == _SUM else tuple(target.shape), ())

    def call(parts: Parts) -> Sequence[torch.Tensor]:
        x, classes, *weights = parts
        found: Sequence[torch.Tensor] = operator(
            x, classes, weights[0] if weights else None, local, ignored
        )
        return found

    def call_on_classes(parts: Parts) -> Sequence[torch.Tensor]:
        x, classes, numbers, *weights = parts
        here, place = places(classes, numbers)
        counts = classes != ignored
        losses = -x.gather(1, place.unsqueeze(1)).squeeze(1)
        own = counts.to(x.dtype)
        if weights:
            losses = losses * weights[0][place]
            own = weights[0][place].where(here & counts, 0)
        unknown = counts & ((classes < 0) | (classes >= inputs.shape[1]))
        losses = losses.where(here & counts, 0).masked_fill(unknown, torch.nan)
        return (losses if local == _NONE else losses.sum(), own.sum())

    numbers = _numbers(inputs)
    split = numbers is not None
    rule = rules.nll_loss(inputs.ndim, weight is not None, local == _SUM, split)
    operands = _given(inputs, target, numbers, weight)
    compute = call_on_classes if split else call
    loss, total = run_rule(operator, rule, operands, compute, sums)
    with torch.no_grad():
        # The gradient divides by it, on every rank. If losses are not reduced, it is zero.
        total = reduced(total) if local == _SUM else total.new_zeros(())
        return (loss / total if reduction == _MEAN else loss), total


def _nll_loss_backward(
    operator: Any,
    gradient: Any,
    inputs: Any,
    target: Any,
    weight: Any,
    reduction: int,
    ignored: int,
    total: Any,
) -> Any:
    def call(parts: Parts) -> Sequence[torch.Tensor]:
        grad, x, classes, full_total, *weights = parts
        own = weights[0] if weights else None
        return (operator(grad, x, classes, own, reduction, ignored, full_total),)

    def call_on_classes(parts: Parts) -> Sequence[torch.Tensor]:
        grad, x, classes, full_total, numbers, *weights = parts
        each = grad / full_total if reduction == _MEAN else grad
        here, place = places(classes, numbers)
        each = -each * weights[0][place] if weights else -each
        each = each.where(here & (classes != ignored), 0).to(x.dtype)
        return (torch.zeros_like(x).scatter_(1, place.unsqueeze(1), each.unsqueeze(1)),)

    numbers = _numbers(inputs)
    split = numbers is not None
    rule = rules.nll_loss_backward(inputs.ndim, weight is not None, reduction != _NONE, split)
    operands = _given(gradient, inputs, target, total, numbers, weight)
    return run_rule(operator, rule, operands, call_on_classes if split else call)[0]


def places(wanted: torch.Tensor, numbers: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns whether each of `wanted` is in the sorted `numbers`, and its index, arbitrary if not.

    A rank has several pieces of a dim that is split within its segments.
    """
    place = torch.searchsorted(numbers, wanted.to(numbers.dtype)).clamp(max=len(numbers) - 1)
    return numbers[place] == wanted, place


def _numbers(inputs: Any) -> torch.Tensor | None:
    """Returns the number of each class, split as the classes; None if they are replicated."""
    sharded = isinstance(inputs, ShardedTensor)
    if not sharded or inputs.ndim == 1 or not inputs.form.layout.dim_axes(1):
        return None
    return torch.arange(inputs.shape[1], device=inputs.device)


def _given(*operands: torch.Tensor | None) -> list[torch.Tensor]:
    return [each for each in operands if each is not None]


HANDLERS: dict[Any, Handler] = {
    aten.nll_loss_forward.default: _nll_loss,
    aten.nll_loss2d_forward.default: _nll_loss,
    aten.nll_loss_backward.default: _nll_loss_backward,
    aten.nll_loss2d_backward.default: _nll_loss_backward,
}
