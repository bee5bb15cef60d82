"""Operators composed of others, which are dispatched one by one, to all-gather nothing.

For variances, batch norms, and softmax along a sharded dim, ranks reduce sums and maxima.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from shardcore.adapters import torch_private
from shardcore.adapters.engine.redistribution import reduced
from shardcore.adapters.engine.task import Handler, Operand, Operator, Planner, by_operator

aten = torch.ops.aten


def _variance(
    operator: Operator,
    x: torch.Tensor,
    dim: Sequence[int] | None = None,
    *,
    correction: float | None = None,
    keepdim: bool = False,
) -> Any:
    """Runs `var`, `std` and `var_mean` by two passes over `x`, in the dtype of `precise`."""
    dims = [d % x.ndim for d in dim] if dim else list(range(x.ndim))
    count = math.prod(x.shape[d] for d in dims)
    values = precise(x)
    mean = reduced(values.sum(dims, keepdim=True)) / count
    deviation = values - mean
    free = max(count - (1 if correction is None else correction), 0)
    variance = reduced((deviation * deviation).sum(dims, keepdim=True)) / free
    if not keepdim:
        variance, mean = variance.squeeze(dims), mean.squeeze(dims)
    if operator is aten.var_mean.correction:
        return variance.to(x.dtype), mean.to(x.dtype)
    return (variance.sqrt() if operator is aten.std.correction else variance).to(x.dtype)


def precise(x: torch.Tensor) -> Any:
    """Converts half precision to float32, which holds the sum of many elements."""
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x


def _batch_norm(_operator: Operator, *args: Any) -> Any:
    """Normalizes over the global batch (ADR 5); returns output, mean, and inverse deviation."""
    x, weight, bias, running_mean, running_var, _, momentum, eps = args
    values = reduced(precise(x))
    variance, mean = torch.var_mean(values, dim=_sample_dims(x), correction=0)
    one_over = (variance + eps).rsqrt()
    output = (values - _per_channel(mean, x)) * _per_channel(one_over, x)
    if weight is not None:
        output = output * _per_channel(weight, x)
    if bias is not None:
        output = output + _per_channel(bias, x)
    count = _samples(x)
    _update_running(running_mean, mean, momentum)
    _update_running(running_var, variance * (count / max(count - 1, 1)), momentum)
    return output.to(x.dtype), mean, one_over


def _batch_norm_backward(_operator: Operator, *args: Any) -> Any:
    gradient, x, weight, _, _, mean, one_over, _, _, mask = args
    gradient, dims = reduced(precise(gradient)), _sample_dims(x)
    normalized = (precise(x) - _per_channel(mean, x)) * _per_channel(one_over, x)
    of_bias = reduced(gradient.sum(dims))
    of_weight = reduced((gradient * normalized).sum(dims))
    scale = one_over if weight is None else one_over * weight
    through_moments = _per_channel(of_bias, x) + normalized * _per_channel(of_weight, x)
    of_input = (gradient - through_moments / _samples(x)) * _per_channel(scale, x)
    gradients = (of_input.to(x.dtype), of_weight, of_bias)
    return tuple(grad if wanted else None for grad, wanted in zip(gradients, mask, strict=True))


def _sample_dims(x: torch.Tensor) -> list[int]:
    return [dim for dim in range(x.ndim) if dim != 1]


def _samples(x: torch.Tensor) -> int:
    return math.prod(x.shape[dim] for dim in _sample_dims(x))


def _per_channel(values: torch.Tensor, x: torch.Tensor) -> Any:
    return values.reshape([1, -1, *[1] * (x.ndim - 2)])


def _update_running(running: torch.Tensor | None, value: torch.Tensor, momentum: float) -> None:
    if running is not None:
        running.mul_(1 - momentum).add_(value.to(running.dtype), alpha=momentum)


def _by(run: Handler, operands: slice, training: int | None = None) -> Planner:
    """Plans `run`, in training alone, if ranks reduce floats of an operand."""

    def plan(_operator: Operator, *args: object, **_kwargs: object) -> Handler | None:
        is_used = training is None or args[training]
        forms = [arg.form for arg in args[operands] if isinstance(arg, Operand)]
        any_sharded = any(not form.is_replicated and form.dtype.is_floating_point for form in forms)
        return run if is_used and any_sharded else None

    return plan


def _softmax(x: torch.Tensor, dim: int, in_float: bool) -> Any:
    """Reduces over the ranks; a row whose maximum is infinite gives nan, as on one device.

    With `in_float`, the result of half precision is in float32.
    """
    powers = _shifted(x, dim).exp()
    result = powers / reduced(powers.sum(dim, keepdim=True))
    return result if in_float else result.to(x.dtype)


def _safe_softmax(x: torch.Tensor, dim: int, dtype: torch.dtype | None = None) -> Any:
    """Computes zeros where all is minus infinity."""
    values = precise(x)
    largest = reduced(values.amax(dim, keepdim=True))
    powers = (values - largest.masked_fill(largest == -torch.inf, 0)).exp()
    total = reduced(powers.sum(dim, keepdim=True))
    return (powers / total.masked_fill(total == 0, 1)).to(dtype or x.dtype)


def _log_softmax(x: torch.Tensor, dim: int, in_float: bool) -> Any:
    shifted = _shifted(x, dim)
    total = reduced(shifted.exp().sum(dim, keepdim=True))
    result = shifted - total.log()
    return result if in_float else result.to(x.dtype)


def _logsumexp(x: torch.Tensor, dims: list[int], keepdim: bool = False) -> Any:
    """Reduces over the ranks along `dims`; a maximum may be infinite."""
    values = precise(x)
    largest = reduced(values.amax(dims, keepdim=True))
    largest = largest.masked_fill(largest.isinf(), 0)
    total = reduced((values - largest).exp().sum(dims, keepdim=True))
    log_sum = (total.log() + largest).to(x.dtype)
    return log_sum if keepdim else log_sum.squeeze(dims)


def _softmax_backward(
    gradient: torch.Tensor, output: torch.Tensor, dim: int, dtype: torch.dtype
) -> Any:
    gradient, probabilities = precise(gradient), precise(output)
    weighted = gradient * probabilities
    mean = reduced(weighted.sum(dim, keepdim=True))
    return (weighted - probabilities * mean).to(dtype)


def _log_softmax_backward(
    gradient: torch.Tensor, output: torch.Tensor, dim: int, dtype: torch.dtype
) -> Any:
    gradient, logarithms = precise(gradient), precise(output)
    total = reduced(gradient.sum(dim, keepdim=True))
    return (gradient - logarithms.exp() * total).to(dtype)


def _shifted(x: torch.Tensor, dim: int) -> Any:
    """Subtracts the maximum along `dim`, so that no exponential overflows."""
    values = precise(x)
    return values - reduced(values.amax(dim, keepdim=True))


_SOFTMAX, _LOG_SOFTMAX = torch_private.SOFTMAX
_SOFTMAX_BACKWARD, _LOG_SOFTMAX_BACKWARD = torch_private.SOFTMAX_BACKWARD
_BY_OPERATOR: dict[Any, Callable[..., Any]] = {
    _SOFTMAX: _softmax,
    torch_private.SAFE_SOFTMAX: _safe_softmax,
    _LOG_SOFTMAX: _log_softmax,
    _SOFTMAX_BACKWARD: _softmax_backward,
    _LOG_SOFTMAX_BACKWARD: _log_softmax_backward,
    torch.ops.aten.logsumexp.default: _logsumexp,
}


def run_softmax(operator: Operator, x: torch.Tensor, *args: object) -> Any:
    """Runs a softmax, the gradient of one, or `logsumexp`, along a sharded dim."""
    return _BY_OPERATOR[operator](reduced(x), *args)


PLANNERS: dict[Any, Planner] = by_operator(
    {
        "var.correction std.correction var_mean.correction": _by(_variance, slice(1)),
        "native_batch_norm": _by(_batch_norm, slice(5), training=5),
        "native_batch_norm_backward": _by(_batch_norm_backward, slice(7), training=7),
    }
)
