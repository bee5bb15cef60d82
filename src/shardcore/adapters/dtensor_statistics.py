"""Variances over a split dim, without gathering it: sums of each rank's part are reduced.

torch 2.13: DTensor gathers the operand of `var`, which is the batch in a batch normalization.
"""

from typing import Any

import torch
from torch.distributed.tensor import DTensor

from shardcore.adapters import torch_compat
from shardcore.adapters.dtensor_placements import settled, splits
from shardcore.adapters.split_statistics import moments
from shardcore.adapters.torch_compat import dtensor as dtensor_compat

aten = torch.ops.aten


def _splits(x: Any, dim: Any = None, **_: Any) -> bool:
    """Whether a dim that is reduced is split, or the operand pending."""
    if not isinstance(x, DTensor) or not x.is_floating_point():
        return False
    dims = [each % x.ndim for each in dim] if dim else range(x.ndim)
    return any(p.is_partial() or splits(p, each) for p in x.placements for each in dims)


def _variance(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """`var`: its gradient needs `x - mean` only, which is split as `x` is."""
    if not _splits(*args, **kwargs):
        return dtensor_compat.as_torch_does(operator, args, kwargs)
    return moments(settled, *args, **kwargs)[0].to(args[0].dtype)


def _deviation(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """`std`."""
    if not _splits(*args, **kwargs):
        return dtensor_compat.as_torch_does(operator, args, kwargs)
    return moments(settled, *args, **kwargs)[0].sqrt().to(args[0].dtype)


def _variance_and_mean(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """`var_mean`."""
    if not _splits(*args, **kwargs):
        return dtensor_compat.as_torch_does(operator, args, kwargs)
    variance, mean = moments(settled, *args, **kwargs)
    return variance.to(args[0].dtype), mean.to(args[0].dtype)


HANDLERS: dict[Any, torch_compat.Handler] = {
    aten.var.correction: _variance,
    aten.std.correction: _deviation,
    aten.var_mean.correction: _variance_and_mean,
}
