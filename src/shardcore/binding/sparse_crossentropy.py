"""Seam: `keras.ops.sparse_categorical_crossentropy`, of many samples in each row of a batch."""

import math
from collections.abc import Callable
from functools import wraps
from typing import Any

import keras

from shardcore.binding.session import Session, Sessions
from shardcore.domain.layout import Layout


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
