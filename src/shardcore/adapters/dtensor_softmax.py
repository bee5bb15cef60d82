"""Softmax along a split dim, as of logits whose classes are split: DTensor would gather them.

Known for torch 2.13.
"""

from typing import Any

import torch
from torch.distributed.tensor import DTensor

from shardcore.adapters import torch_compat
from shardcore.adapters.dtensor_placements import settled, splits
from shardcore.adapters.split_softmax import SPLIT
from shardcore.adapters.torch_compat import dtensor as dtensor_compat


def _softmax(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """`_softmax(x, dim, in_float)` and `_log_softmax`."""
    if kwargs or not _along_split(args[0], args[1]):
        return dtensor_compat.as_torch_does(operator, args, kwargs)
    with torch.no_grad():
        return SPLIT[operator](settled, settled(args[0]), *args[1:])


def _softmax_backward(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """`_softmax_backward_data(gradient, output, dim, dtype)` and that of `_log_softmax`."""
    if kwargs or not _along_split(args[1], args[2]):
        return dtensor_compat.as_torch_does(operator, args, kwargs)
    with torch.no_grad():
        return SPLIT[operator](settled, settled(args[0]), *args[1:])


def _along_split(x: Any, dim: int) -> bool:
    """Whether several ranks split `dim` of `x`."""
    return isinstance(x, DTensor) and any(
        size > 1 and splits(placement, dim % max(x.ndim, 1))
        for size, placement in zip(x.device_mesh.shape, x.placements, strict=True)
    )


HANDLERS: dict[Any, torch_compat.Handler] = {
    **dict.fromkeys(torch_compat.SOFTMAX, _softmax),
    **dict.fromkeys(torch_compat.SOFTMAX_BACKWARD, _softmax_backward),
}
