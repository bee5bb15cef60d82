"""Normalizations of torch modules, `torch.nn.BatchNorm2d` and its kind, over split operands.

Keras' own layers normalize by means and variances. torch 2.13 gathers the batch for these
operators, drops what they write into running statistics, and counts the samples of one rank.
"""

import math
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Replicate

from shardcore.adapters import torch_compat
from shardcore.adapters.dtensor_trust import any_split, run_whole

aten = torch.ops.aten


def _batch_norm(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Over the global batch, without gathering it: output, mean, one over the deviation."""
    x, weight, bias, running_mean, running_var, training, momentum, eps = args
    if not training or not any_split(args):
        return torch_compat.as_torch_does(operator, args, kwargs)
    precise = _reduced(_precise(x))
    variance, mean = torch.var_mean(precise, dim=_sample_dims(x), correction=0)
    one_over = (variance + eps).rsqrt()
    output = (precise - _per_channel(mean, x)) * _per_channel(one_over, x)
    if weight is not None:
        output = output * _per_channel(weight, x)
    if bias is not None:
        output = output + _per_channel(bias, x)
    count = _samples(x)
    _follow(running_mean, mean, momentum)
    _follow(running_var, variance * (count / max(count - 1, 1)), momentum)
    return output.to(x.dtype), mean, one_over


def _batch_norm_backward(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The gradients of input, weight and bias, those that the mask asks for."""
    gradient, x, weight, _, _, mean, one_over, training, _, mask = args
    if not training or not any_split(args):
        return torch_compat.as_torch_does(operator, args, kwargs)
    gradient, dims = _reduced(_precise(gradient)), _sample_dims(x)
    normalized = (_precise(x) - _per_channel(mean, x)) * _per_channel(one_over, x)
    of_bias = _reduced(gradient.sum(dims))
    of_weight = _reduced((gradient * normalized).sum(dims))
    scale = one_over if weight is None else one_over * weight
    through_moments = _per_channel(of_bias, x) + normalized * _per_channel(of_weight, x)
    of_input = (gradient - through_moments / _samples(x)) * _per_channel(scale, x)
    found = (of_input.to(x.dtype), of_weight, of_bias)
    return tuple(each if wanted else None for each, wanted in zip(found, mask, strict=True))


def _group_norm(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """It is told the number of samples, of channels and of pixels: those of whole operands."""
    run = run_whole if any_split(args) else torch_compat.as_torch_does
    return run(operator, args, kwargs)


def _sample_dims(x: Any) -> list[int]:
    return [dim for dim in range(x.ndim) if dim != 1]


def _samples(x: Any) -> int:
    return math.prod(x.shape[dim] for dim in _sample_dims(x))


def _precise(x: Any) -> Any:
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x


def _per_channel(values: Any, x: Any) -> Any:
    return values.reshape([1, -1, *[1] * (x.ndim - 2)])


def _follow(running: Any, value: Any, momentum: float) -> None:
    """Move a running statistic, in its own layout, towards the batch's."""
    if running is None:
        return
    placements = getattr(running, "placements", [Replicate()] * value.device_mesh.ndim)
    value = value.redistribute(placements=placements)
    if not isinstance(running, DTensor):
        value = value.to_local()
    running.mul_(1 - momentum).add_(value.to(running.dtype), alpha=momentum)


def _reduced(x: Any) -> Any:
    if not isinstance(x, DTensor):
        return x
    return x.redistribute(placements=[Replicate() if p.is_partial() else p for p in x.placements])


HANDLERS: dict[Any, torch_compat.Handler] = {
    aten.native_batch_norm.default: _batch_norm,
    aten.native_batch_norm_backward.default: _batch_norm_backward,
    aten.native_group_norm.default: _group_norm,
    aten.native_group_norm_backward.default: _group_norm,
}
