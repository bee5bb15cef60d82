"""Losses of torch that compare an input with a target, element by element."""

from typing import Any

import torch

from shardcore.adapters.engine.operators import pointwise
from shardcore.adapters.engine.task import Handler, Operator, Planner, Task, by_operator

_NONE, _MEAN = 0, 1  # the numbers by which torch names a reduction; any other is a sum


def _loss(position: int) -> Planner:
    """Plans a loss; its reduction is at `position` of the arguments."""

    def compute(operator: Operator, *args: object) -> Any:
        losses = operator(*_unreduced_args(args, position))
        return losses.mean() if _reduction(args, position) == _MEAN else losses.sum()

    return _planner(position, compute)


def _loss_backward(position: int) -> Planner:
    """Plans the gradient of a loss; its reduction is at `position` of the arguments.

    torch divides the gradient of a mean by the number of elements that it sees: those of one rank.
    """

    def compute(operator: Operator, *args: object) -> torch.Tensor:
        gradient, inputs, *rest = _unreduced_args(args, position)
        if _reduction(args, position) == _MEAN:
            gradient = gradient / inputs.numel()
        of_inputs: torch.Tensor = operator(gradient.expand(inputs.shape), inputs, *rest)
        return of_inputs

    return _planner(position, compute)


def _planner(position: int, reduce: Handler) -> Planner:
    def plan(operator: Operator, *args: object) -> Task | Handler | None:
        if _reduction(args, position) == _NONE:
            return pointwise.plan(operator, *args)
        return reduce

    return plan


def _reduction(args: tuple[Any, ...], position: int) -> int:
    reduction: int = args[position] if len(args) > position else _MEAN
    return reduction


def _unreduced_args(args: tuple[object, ...], position: int) -> list[Any]:
    """Asks for no reduction; omitted arguments are None."""
    given = [*args, *[None] * (position + 1 - len(args))]
    given[position] = _NONE
    return given


PLANNERS: dict[Any, Planner] = by_operator(
    {
        "mse_loss huber_loss smooth_l1_loss soft_margin_loss": _loss(2),
        "binary_cross_entropy": _loss(3),
        "binary_cross_entropy_with_logits": _loss(4),
        "mse_loss_backward huber_loss_backward smooth_l1_loss_backward "
        "soft_margin_loss_backward": _loss_backward(3),
        "binary_cross_entropy_backward": _loss_backward(4),
    }
)
