"""Variances, and normalizations over the batch."""

from typing import Any

import torch

from shardcore.adapters.engine.operators.moments import batch_norm, batch_norm_backward, moments
from shardcore.adapters.engine.planned import Operand
from shardcore.adapters.engine.registry import Handler, Planner

aten = torch.ops.aten


def _splits(tensor: Any) -> bool:
    """Whether `tensor` is one of floats that the ranks have to reduce together."""
    return (
        isinstance(tensor, Operand)
        and not tensor.form.is_replicated
        and tensor.dtype.is_floating_point
    )


def _by(run: Handler, operands: slice, training: int | None = None) -> Planner:
    """Run by `run` where ranks have to reduce one of the operands together, as in training."""

    def plan(_operator: Any, args: tuple[Any, ...], _kwargs: dict[str, Any]) -> Handler | None:
        is_used = training is None or args[training]
        return run if is_used and any(map(_splits, args[operands])) else None

    return plan


def _variance(_operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """`var`."""
    return moments(*args, **kwargs)[0].to(args[0].dtype)


def _deviation(_operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """`std`."""
    return moments(*args, **kwargs)[0].sqrt().to(args[0].dtype)


def _variance_and_mean(_operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """`var_mean`."""
    return tuple(each.to(args[0].dtype) for each in moments(*args, **kwargs))


PLANNERS: dict[Any, Planner] = {
    aten.var.correction: _by(_variance, slice(1)),
    aten.std.correction: _by(_deviation, slice(1)),
    aten.var_mean.correction: _by(_variance_and_mean, slice(1)),
    aten.native_batch_norm.default: _by(batch_norm, slice(5), training=5),
    aten.native_batch_norm_backward.default: _by(batch_norm_backward, slice(7), training=7),
}
