"""Losses of torch that compare an input with a target, element by element."""

from typing import Any

import torch

from shardcore.adapters.engine.operators import pointwise
from shardcore.adapters.engine.plans.task import Handler, Operator, Planner, Task, by_operator

_NONE, _MEAN = 0, 1  # the numbers by which torch names a reduction; any other is a sum


def _loss(place: int) -> Planner:
    """Returns a planner of a loss; its reduction is at `place` of the arguments."""

    def compute(operator: Operator, *args: object) -> Any:
        losses = operator(*_unreduced_args(args, place))
        return losses.mean() if _reduction(args, place) == _MEAN else losses.sum()

    return _planner(place, compute)


def _loss_backward(place: int) -> Planner:
    """Returns a planner of the gradient of a loss; its reduction is at `place` of the arguments.

    torch divides the gradient of a mean by the number of elements that it sees: those of one rank.
    """

    def compute(operator: Operator, *args: object) -> torch.Tensor:
        gradient, inputs, *rest = _unreduced_args(args, place)
        if _reduction(args, place) == _MEAN:
            gradient = gradient / inputs.numel()
        of_inputs: torch.Tensor = operator(gradient.expand(inputs.shape), inputs, *rest)
        return of_inputs

    return _planner(place, compute)


def _planner(place: int, reduce: Handler) -> Planner:
    def plan(operator: Operator, *args: object) -> Task | Handler | None:
        if _reduction(args, place) == _NONE:
            return pointwise.plan(operator, *args)
        return reduce

    return plan


def _reduction(args: tuple[Any, ...], place: int) -> int:
    reduction: int = args[place] if len(args) > place else _MEAN
    return reduction


def _unreduced_args(args: tuple[object, ...], place: int) -> list[Any]:
    """Returns the arguments of the loss without a reduction; omitted ones are None."""
    given = [*args, *[None] * (place + 1 - len(args))]
    given[place] = _NONE
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
