"""Losses that look up the class of each sample, split by `domain.operator_rules_losses`.

A mean over samples of which some are ignored, or weigh more, is no mean of the ranks' means: the
sum and the total weight are each summed over the ranks, then divided. Where classes are split, each
rank looks for its own (`split_classes`). Like `split_operators`, for every library of sharded
tensors.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from shardcore.adapters import split_classes, torch_compat
from shardcore.adapters.split_operators import Parts, RunSplit
from shardcore.domain import operator_rules_classes as classes_rules
from shardcore.domain import operator_rules_losses as rules

aten = torch.ops.aten

# torch's numbers for `reduction=`.
_NONE, _MEAN, _SUM = 0, 1, 2
Settle = Callable[[Any], Any]


def _nll_loss(
    run: RunSplit, settle: Settle, operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
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
        losses, counts = split_classes.nll_loss(
            x, classes, numbers, weights[0] if weights else None, inputs.shape[1], ignored
        )
        return (losses if local == _NONE else losses.sum(), counts.sum())

    if _splits_classes(inputs):
        rule = classes_rules.nll_loss_of_classes(inputs.ndim, weight is not None, local == _SUM)
        operands = _given(inputs, target, _numbers(inputs), weight)
        loss, total = run(operator, rule, operands, call_on_classes, sums)
    else:
        rule = rules.nll_loss(inputs.ndim, weight is not None, local == _SUM)
        loss, total = run(operator, rule, _given(inputs, target, weight), call, sums)
    with torch.no_grad():
        # The gradient divides by it, on every rank. Of losses that are not summed it is zero.
        total = settle(total) if local == _SUM else total.new_zeros(())
        return (loss / total if reduction == _MEAN else loss), total


def _nll_loss_backward(
    run: RunSplit, operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """`nll_loss_backward(gradient, input, target, weight, reduction, ignore_index, total)`."""
    gradient, inputs, target, weight, reduction, ignored, total = args

    def call(parts: Parts) -> Sequence[torch.Tensor]:
        grad, x, classes, *weights, whole_total = parts
        found = operator(
            grad,
            x,
            classes,
            weights[0] if weights else None,
            reduction,
            ignored,
            whole_total,
            **kwargs,
        )
        return (found,)

    def call_on_classes(parts: Parts) -> Sequence[torch.Tensor]:
        grad, x, classes, whole_total, numbers, *weights = parts
        each = grad / whole_total if reduction == _MEAN else grad
        own = weights[0] if weights else None
        return (split_classes.nll_loss_backward(each, x, classes, numbers, own, ignored),)

    facts = (inputs.ndim, weight is not None, reduction != _NONE)
    if _splits_classes(inputs):
        rule = classes_rules.nll_loss_of_classes_backward(*facts)
        operands = _given(gradient, inputs, target, total, _numbers(inputs), weight)
        return run(operator, rule, operands, call_on_classes)[0]
    rule = rules.nll_loss_backward(*facts)
    return run(operator, rule, _given(gradient, inputs, target, weight, total), call)[0]


def _splits_classes(inputs: Any) -> bool:
    """Whether the classes of several samples are split."""
    placements = getattr(inputs, "placements", ())
    return inputs.ndim > 1 and any(getattr(each, "dim", None) == 1 for each in placements)


def _numbers(inputs: torch.Tensor) -> torch.Tensor:
    """The number of each class: a plain tensor, of which a rank keeps those of its classes."""
    return torch.arange(inputs.shape[1], device=inputs.device)


def _given(*operands: torch.Tensor | None) -> list[torch.Tensor]:
    return [each for each in operands if each is not None]


def handlers(run: RunSplit, settle: Settle) -> dict[Any, torch_compat.Handler]:
    """What a library does with the losses, given how it runs what is split, and settles sums."""
    forward, backward = partial(_nll_loss, run, settle), partial(_nll_loss_backward, run)
    return {
        aten.nll_loss_forward.default: forward,
        aten.nll_loss2d_forward.default: forward,
        aten.nll_loss_backward.default: backward,
        aten.nll_loss2d_backward.default: backward,
    }
