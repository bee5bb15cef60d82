"""Variances, and normalizations over the batch, of slices."""

from typing import Any

import torch

from shardcore.adapters import torch_compat
from shardcore.adapters.slices.tensor import Slice, settled
from shardcore.adapters.slices.whole import run_whole
from shardcore.adapters.split_statistics import batch_norm, batch_norm_backward, moments

aten = torch.ops.aten


def _is_plain_matter(tensor: Any) -> bool:
    """Whether there is nothing to reduce over ranks, or no float to do it with."""
    return not isinstance(tensor, Slice) or tensor.is_whole or not tensor.is_floating_point()


def _variance(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """`var`."""
    if _is_plain_matter(args[0]):
        return run_whole(operator, args, kwargs)
    return moments(settled, *args, **kwargs)[0].to(args[0].dtype)


def _deviation(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """`std`."""
    if _is_plain_matter(args[0]):
        return run_whole(operator, args, kwargs)
    return moments(settled, *args, **kwargs)[0].sqrt().to(args[0].dtype)


def _variance_and_mean(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """`var_mean`."""
    if _is_plain_matter(args[0]):
        return run_whole(operator, args, kwargs)
    return tuple(each.to(args[0].dtype) for each in moments(settled, *args, **kwargs))


def _batch_norm(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """`native_batch_norm(input, weight, bias, mean, variance, training, momentum, eps)`."""
    if not args[5] or all(_is_plain_matter(each) for each in args[:5]):
        return run_whole(operator, args, kwargs)
    return batch_norm(settled, _follow, args)


def _batch_norm_backward(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Its gradients."""
    if not args[7] or all(_is_plain_matter(each) for each in args[:7]):
        return run_whole(operator, args, kwargs)
    return batch_norm_backward(settled, args)


def _follow(running: Any, value: Any, momentum: float) -> None:
    """Move a running statistic, in its own layout, towards the batch's."""
    if running is not None:
        running.mul_(1 - momentum).add_(value.to(running.dtype), alpha=momentum)


HANDLERS: dict[Any, torch_compat.Handler] = {
    aten.var.correction: _variance,
    aten.std.correction: _deviation,
    aten.var_mean.correction: _variance_and_mean,
    aten.native_batch_norm.default: _batch_norm,
    aten.native_batch_norm_backward.default: _batch_norm_backward,
}
