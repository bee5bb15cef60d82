"""Losses that look up the class of each sample, split by `domain.operator_rules_losses`.

A mean over samples of which some are ignored, or weigh more, is no mean of the ranks' means: the
sum and the total weight are each summed over the ranks, then divided. Like `split_operators`, for
every library of sharded tensors.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from shardcore.adapters import torch_compat
from shardcore.adapters.split_operators import Parts, RunSplit
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

    def call(parts: Parts) -> Sequence[torch.Tensor]:
        x, classes, *weights = parts
        found: Sequence[torch.Tensor] = operator(
            x, classes, weights[0] if weights else None, local, ignored, **kwargs
        )
        return found

    rule = rules.nll_loss(inputs.ndim, weight is not None, local == _SUM)
    operands = [each for each in (inputs, target, weight) if each is not None]
    sums = (() if local == _SUM else tuple(target.shape), ())
    loss, total = run(operator, rule, operands, call, sums)
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

    rule = rules.nll_loss_backward(inputs.ndim, weight is not None, reduction != _NONE)
    operands = [each for each in (gradient, inputs, target, weight, total) if each is not None]
    return run(operator, rule, operands, call)[0]


def handlers(run: RunSplit, settle: Settle) -> dict[Any, torch_compat.Handler]:
    """What a library does with the losses, given how it runs what is split, and settles sums."""
    forward, backward = partial(_nll_loss, run, settle), partial(_nll_loss_backward, run)
    return {
        aten.nll_loss_forward.default: forward,
        aten.nll_loss2d_forward.default: forward,
        aten.nll_loss_backward.default: backward,
        aten.nll_loss2d_backward.default: backward,
    }
