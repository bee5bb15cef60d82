"""Seam: `keras.ops.scatter`, which confusion matrices are made by, in one call."""

from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any

import keras
import torch

from shardcore.binding import seams


def scatter_at_once(original: Callable[..., Any]) -> Callable[..., Any]:
    """`scatter`: Keras adds value by value, and reads each index on the host."""

    @wraps(original)
    def scatter(indices: Any, values: Any, shape: Sequence[int]) -> Any:
        indices = keras.ops.convert_to_tensor(indices)
        if indices.is_floating_point() or indices.dtype is torch.bool:
            return original(indices, values, shape)
        return _added(indices.long(), keras.ops.convert_to_tensor(values), tuple(shape))

    return scatter


def _added(indices: torch.Tensor, values: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    """The sum of `values` at each of `indices`, zero where there is none.

    torch 2.13 adds up `float32` on a CPU in several threads, in any order: ranks would differ in
    last bits. In `float64` it does not.
    """
    length = indices.shape[-1]
    numbers = indices.reshape(-1, length).unbind(-1)
    rows = values.reshape(-1, *shape[length:])
    is_unordered = values.dtype is torch.float32 and values.device.type == "cpu"
    in_turn = torch.float64 if is_unordered else values.dtype
    zeros = torch.zeros(shape, dtype=in_turn, device=seams.torch_device())
    return torch.index_put(zeros, numbers, rows.to(in_turn), accumulate=True).to(values.dtype)
