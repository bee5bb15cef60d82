"""Seams: operations of Keras. `scatter` in one call; the cross entropy of sequences by rows."""

import math
from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any

import keras
import torch

from shardcore.binding import seams
from shardcore.binding.session import Session, Sessions
from shardcore.domain.layout import Layout


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


def one_sample_a_row(original: Callable[..., Any], sessions: Sessions) -> Callable[..., Any]:
    """`sparse_categorical_crossentropy`: of rows of samples, as of so many rows of one.

    Keras puts the classes first, as `torch.nn.functional.cross_entropy` has them: torch copies all
    logits, and their gradient, and adds up over a dim that is not the last one. Of rows of one
    sample nothing is copied. The sum is rounded otherwise.
    """

    @wraps(original)
    def sparse_categorical_crossentropy(
        target: Any, output: Any, from_logits: bool = False, axis: int = -1
    ) -> Any:
        if not sessions.are_served():
            return original(target, output, from_logits=from_logits, axis=axis)
        target, output = map(keras.ops.convert_to_tensor, (target, output))
        if not _can_be_rows(target, output, axis, sessions.current()):
            return original(target, output, from_logits=from_logits, axis=axis)
        rows = output.reshape(-1, output.shape[-1])
        return original(target.reshape(-1), rows, from_logits=from_logits).reshape(
            output.shape[:-1]
        )

    return sparse_categorical_crossentropy


def _can_be_rows(target: Any, output: Any, axis: int, session: Session | None) -> bool:
    samples = output.shape[:-1]
    return (
        len(samples) > 1
        and axis in (-1, len(samples))
        and tuple(target.shape) in (tuple(samples), (*samples, 1))
        and all(_has_whole_rows(each, session) for each in (target, output))
    )


def _has_whole_rows(tensor: Any, session: Session | None) -> bool:
    """Whether ranks have equal numbers of whole rows of `tensor`: their samples are rows too."""
    layout = None if session is None else session.strategy.layout(tensor)
    if layout is None:
        return True
    of_rows = Layout(layout.mesh, (layout.spec[0], *[None] * (tensor.ndim - 1)))
    ranks = math.prod(map(layout.mesh.axis_size, layout.dim_axes(0)))
    return layout == of_rows and tensor.shape[0] % ranks == 0
