"""Variances over a split dim, without gathering it: sums of each rank's part are reduced.

torch 2.13: DTensor gathers the operand of `var`, which is the batch in a batch normalization.
"""

import math
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Replicate

from shardcore.adapters import torch_compat

aten = torch.ops.aten


def _moments(
    x: Any, dim: Any = None, *, correction: float | None = None, keepdim: bool = False
) -> tuple[Any, Any]:
    """Variance and mean in two passes over `x`, as one device computes them.

    Args:
        x: A DTensor of floats.
        dim: The tensor dims to reduce; None or () for all of them.
        correction: What is taken off the number of elements, 1 if None.
        keepdim: Whether the reduced dims stay, with size 1.
    """
    dims = [each % x.ndim for each in dim] if dim else list(range(x.ndim))
    count = math.prod(x.shape[each] for each in dims)
    mean = _reduced(x.sum(dims, keepdim=True)) / count
    deviation = x - mean
    free = max(count - (1 if correction is None else correction), 0)
    variance = _reduced((deviation * deviation).sum(dims, keepdim=True)) / free
    if keepdim:
        return variance, mean
    return variance.squeeze(dims), mean.squeeze(dims)


def _reduced(x: Any) -> Any:
    placements = [Replicate() if each.is_partial() else each for each in x.placements]
    return x.redistribute(placements=placements)


def _splits(x: Any, dim: Any = None, **_: Any) -> bool:
    """Whether a dim that is reduced is split, or the operand pending."""
    if not isinstance(x, DTensor) or not x.is_floating_point():
        return False
    dims = [each % x.ndim for each in dim] if dim else range(x.ndim)
    return any(p.is_partial() or p.is_shard(each) for p in x.placements for each in dims)


def _variance(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """`var`: its gradient needs `x - mean` only, which is split as `x` is."""
    if not _splits(*args, **kwargs):
        return torch_compat.as_torch_does(operator, args, kwargs)
    return _moments(*args, **kwargs)[0]


def _deviation(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """`std`."""
    if not _splits(*args, **kwargs):
        return torch_compat.as_torch_does(operator, args, kwargs)
    return _moments(*args, **kwargs)[0].sqrt()


def _variance_and_mean(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """`var_mean`."""
    if not _splits(*args, **kwargs):
        return torch_compat.as_torch_does(operator, args, kwargs)
    return _moments(*args, **kwargs)


HANDLERS: dict[Any, torch_compat.Handler] = {
    aten.var.correction: _variance,
    aten.std.correction: _deviation,
    aten.var_mean.correction: _variance_and_mean,
}
