"""Patches: slices whose start is a tensor.

Keras reads the start on the host, so a trace would hold for that start only. `generate()`
writes each token by such a slice.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import keras
import torch
from torch.overrides import TorchFunctionMode

from shardcore.binding import keras_private
from shardcore.binding.keras_private.patches import replaces
from shardcore.binding.ranks.session import Session, Sessions
from shardcore.binding.types import Original
from shardcore.domain.scope import Scope
from shardcore.ports.types import Array


@replaces(
    "keras.src.backend.torch.core:slice",
    reason="Reads where a slice begins on the host: a trace would have one place only.",
)
def slice_tensor(
    sessions: Sessions, original: Original, inputs: Array, start_indices: Any, shape: Any
) -> torch.Tensor:
    """Replaces `slice`: looks up the places of a slice that begins at a number in a tensor."""
    session = sessions.current()
    listed = all(isinstance(argument, tuple | list) for argument in (start_indices, shape))
    if (
        not _is_replaced(session)
        or keras_private.is_symbolic()
        or not listed
        or not all(isinstance(size, int) for size in shape)
    ):
        sliced: torch.Tensor = original(inputs, start_indices, shape)
        return sliced
    sliced = keras.ops.convert_to_tensor(inputs)
    for dim, (start, size) in enumerate(zip(start_indices, shape, strict=True)):
        if isinstance(start, torch.Tensor):
            numbers = torch.arange(size, device=sliced.device)
            first = _from_begin(_full_index(start, session), sliced.shape[dim])
            sliced = torch.index_select(sliced, dim, first + numbers)
        elif (start, size) != (0, sliced.shape[dim]):
            sliced = sliced[(*[slice(None)] * dim, slice(start, start + size))]
    return sliced


@replaces(
    "keras.src.backend.torch.core:slice_update",
    reason="Writes element by element, by indices of the full tensor.",
)
def update(
    sessions: Sessions, original: Original, inputs: Array, start_indices: Any, updates: Array
) -> torch.Tensor:
    """Replaces `slice_update`: each element is the old or the new one, so no shard is moved.

    Keras writes element by element, each at an index of the full tensor. As with JAX, what would
    be written behind the end of a dim is lost, if its place is a number in a tensor.
    """
    session = sessions.current()
    old: torch.Tensor = keras.ops.convert_to_tensor(inputs)
    new: torch.Tensor = keras.ops.convert_to_tensor(updates).to(old.dtype)
    is_replaced = _is_replaced(session) and not keras_private.is_symbolic()
    if not is_replaced or not _is_within(start_indices, new.shape, old.shape):
        updated: torch.Tensor = original(inputs, start_indices, updates)
        return updated
    is_new: torch.Tensor | None = None
    for dim, start in enumerate(start_indices):
        size, length = new.shape[dim], old.shape[dim]
        if isinstance(start, int) and size == length:
            continue
        places = torch.arange(length, device=old.device) - _from_begin(
            _full_index(start, session), length
        )
        if size > 1:
            new = torch.index_select(new, dim, places.clamp(0, size - 1))
        here = ((places >= 0) & (places < size)).reshape(-1, *[1] * (old.ndim - dim - 1))
        is_new = here if is_new is None else is_new & here
    return new if is_new is None else torch.where(is_new, new, old)


def _is_within(starts: object, sizes: Sequence[int], shape: Sequence[int]) -> bool:
    return isinstance(starts, tuple | list) and all(
        isinstance(start, torch.Tensor) or 0 <= start <= length - size
        for start, size, length in zip(starts, sizes, shape, strict=True)
    )


def _full_index(start: object, session: Session | None) -> Any:
    if session is None or not isinstance(start, torch.Tensor):
        return start
    return session.strategy.full_tensor(start)


def _from_begin(index: object, size: int) -> Any:
    return torch.where(index < 0, index + size, index) if isinstance(index, torch.Tensor) else index


# Whether an iteration of a loop runs, which may be captured on one device too.
_in_loop = Scope("in_loop", default=False)


def _is_replaced(session: Session | None) -> bool:
    return session is not None or _in_loop.now()


@contextmanager
def tensor_indices() -> Iterator[None]:
    """Opens a context in which an index or a start that is a tensor is not read on the host."""
    with _in_loop(value=True), _TensorIndices():
        yield


class _TensorIndices(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.__getitem__:
            indices = args[1] if isinstance(args[1], tuple) else (args[1],)
            if any(map(_is_number, indices)) and all(map(_is_of_one_dim, indices)):
                return _look_up(args[0], indices)
        return func(*args, **(kwargs or {}))


def _is_of_one_dim(index: object) -> bool:
    is_plain = isinstance(index, int | slice) and not isinstance(index, bool)
    return is_plain or _is_number(index)


def _is_number(index: Any) -> bool:
    is_tensor = isinstance(index, torch.Tensor) and not index.ndim
    return is_tensor and index.dtype in (torch.int16, torch.int32, torch.int64)


def _look_up(tensor: torch.Tensor, indices: Sequence[Any]) -> torch.Tensor:
    for dim, index in enumerate(indices):
        if _is_number(index):
            from_begin = _from_begin(index, tensor.shape[dim]).reshape(1)
            tensor = torch.index_select(tensor, dim, from_begin)
    return tensor[tuple(0 if _is_number(index) else index for index in indices)]
