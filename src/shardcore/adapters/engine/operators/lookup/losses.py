"""Losses that look up the class of each sample, split by `domain.rules.losses`.

A mean over samples of which some are ignored, or weigh more, is no mean of the ranks' means: the
sum and the total weight are each summed over the ranks, then divided. Where classes are split, each
rank looks for its own (`class_shards`).
"""

from collections.abc import Sequence
from typing import Any

import torch

from shardcore.adapters.engine.moves.redistribution import reduced
from shardcore.adapters.engine.operators.lookup import class_shards
from shardcore.adapters.engine.plans.planning import run_rule
from shardcore.adapters.engine.plans.task import Handler, Parts
from shardcore.adapters.engine.tensor import ShardedTensor
from shardcore.domain.rules import losses as rules

aten = torch.ops.aten

# torch's numbers for `reduction=`.
_NONE, _MEAN, _SUM = 0, 1, 2


def _nll_loss(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """`nll_loss_forward(input, target, weight, reduction, ignore_index)`: loss, total weight."""
    inputs, target, weight, reduction, ignored = args
    local = _NONE if reduction == _NONE else _SUM
    sums = (() if local == _SUM else tuple(target.shape), ())

    def call(parts: Parts) -> Sequence[torch.Tensor]:
        x, classes, *weights = parts
        found: Sequence[torch.Tensor] = operator(
            x, classes, weights[0] if weights else None, local, ignored, **kwargs
        )
        return found

    def call_on_classes(parts: Parts) -> Sequence[torch.Tensor]:
        x, classes, numbers, *weights = parts
        losses, counts = class_shards.nll_loss(
            x, classes, numbers, weights[0] if weights else None, inputs.shape[1], ignored
        )
        return (losses if local == _NONE else losses.sum(), counts.sum())

    numbers = _numbers(inputs)
    split = numbers is not None
    rule = rules.nll_loss(inputs.ndim, weight is not None, local == _SUM, split)
    operands = _given(inputs, target, numbers, weight)
    compute = call_on_classes if split else call
    loss, total = run_rule(operator, rule, operands, compute, sums)
    with torch.no_grad():
        # The gradient divides by it, on every rank. Of losses that are not summed it is zero.
        total = reduced(total) if local == _SUM else total.new_zeros(())
        return (loss / total if reduction == _MEAN else loss), total


def _nll_loss_backward(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """`nll_loss_backward(gradient, input, target, weight, reduction, ignore_index, total)`."""
    gradient, inputs, target, weight, reduction, ignored, total = args

    def call(parts: Parts) -> Sequence[torch.Tensor]:
        grad, x, classes, full_total, *weights = parts
        own = weights[0] if weights else None
        return (operator(grad, x, classes, own, reduction, ignored, full_total, **kwargs),)

    def call_on_classes(parts: Parts) -> Sequence[torch.Tensor]:
        grad, x, classes, full_total, numbers, *weights = parts
        each = grad / full_total if reduction == _MEAN else grad
        own = weights[0] if weights else None
        return (class_shards.nll_loss_backward(each, x, classes, numbers, own, ignored),)

    numbers = _numbers(inputs)
    split = numbers is not None
    rule = rules.nll_loss_backward(inputs.ndim, weight is not None, reduction != _NONE, split)
    operands = _given(gradient, inputs, target, total, numbers, weight)
    return run_rule(operator, rule, operands, call_on_classes if split else call)[0]


def _numbers(inputs: Any) -> torch.Tensor | None:
    """The number of each class, of which a rank keeps those of its own; None if they are whole."""
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
