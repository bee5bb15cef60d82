"""Normalizations of torch modules, `torch.nn.BatchNorm2d` and its kind, over split operands.

Keras' own layers normalize by means and variances. torch 2.13 gathers the batch for these
operators, drops what they write into running statistics, and counts the samples of one rank.
"""

from typing import Any

import torch
from torch.distributed.tensor import DTensor, Replicate

from shardcore.adapters import torch_compat
from shardcore.adapters.dtensor_placements import settled
from shardcore.adapters.dtensor_trust import any_split, run_whole
from shardcore.adapters.split_statistics import batch_norm, batch_norm_backward
from shardcore.adapters.torch_compat import dtensor as dtensor_compat

aten = torch.ops.aten


def _batch_norm(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Over the global batch, without gathering it: output, mean, one over the deviation."""
    if not args[5] or not any_split(args):
        return dtensor_compat.as_torch_does(operator, args, kwargs)
    return batch_norm(settled, _follow, args)


def _batch_norm_backward(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The gradients of input, weight and bias, those that the mask asks for."""
    if not args[7] or not any_split(args):
        return dtensor_compat.as_torch_does(operator, args, kwargs)
    return batch_norm_backward(settled, args)


def _group_norm(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """It is told the number of samples, of channels and of pixels: those of whole operands."""
    run = run_whole if any_split(args) else dtensor_compat.as_torch_does
    return run(operator, args, kwargs)


def _follow(running: Any, value: Any, momentum: float) -> None:
    """Move a running statistic, in its own layout, towards the batch's."""
    if running is None:
        return
    placements = getattr(running, "placements", [Replicate()] * value.device_mesh.ndim)
    value = value.redistribute(placements=placements)
    if not isinstance(running, DTensor):
        value = value.to_local()
    running.mul_(1 - momentum).add_(value.to(running.dtype), alpha=momentum)


HANDLERS: dict[Any, torch_compat.Handler] = {
    aten.native_batch_norm.default: _batch_norm,
    aten.native_batch_norm_backward.default: _batch_norm_backward,
    aten.native_group_norm.default: _group_norm,
    aten.native_group_norm_backward.default: _group_norm,
}
