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


def _variance(_operator: Any, args: tuple[Any, ...], _kwargs: dict[str, Any]) -> Handler | None:
    """`var`."""

    def run(_operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return moments(*args, **kwargs)[0].to(args[0].dtype)

    return run if _splits(args[0]) else None


def _deviation(_operator: Any, args: tuple[Any, ...], _kwargs: dict[str, Any]) -> Handler | None:
    """`std`."""

    def run(_operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return moments(*args, **kwargs)[0].sqrt().to(args[0].dtype)

    return run if _splits(args[0]) else None


def _variance_and_mean(
    _operator: Any, args: tuple[Any, ...], _kwargs: dict[str, Any]
) -> Handler | None:
    """`var_mean`."""

    def run(_operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return tuple(each.to(args[0].dtype) for each in moments(*args, **kwargs))

    return run if _splits(args[0]) else None


def _batch_norm(_operator: Any, args: tuple[Any, ...], _kwargs: dict[str, Any]) -> Handler | None:
    """`native_batch_norm(input, weight, bias, mean, variance, training, momentum, eps)`."""

    def run(_operator: Any, args: tuple[Any, ...], _kwargs: dict[str, Any]) -> Any:
        return batch_norm(args)

    return run if args[5] and any(map(_splits, args[:5])) else None


def _batch_norm_backward(
    _operator: Any, args: tuple[Any, ...], _kwargs: dict[str, Any]
) -> Handler | None:
    """Its gradients."""

    def run(_operator: Any, args: tuple[Any, ...], _kwargs: dict[str, Any]) -> Any:
        return batch_norm_backward(args)

    return run if args[7] and any(map(_splits, args[:7])) else None


PLANNERS: dict[Any, Planner] = {
    aten.var.correction: _variance,
    aten.std.correction: _deviation,
    aten.var_mean.correction: _variance_and_mean,
    aten.native_batch_norm.default: _batch_norm,
    aten.native_batch_norm_backward.default: _batch_norm_backward,
}
