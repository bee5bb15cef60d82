"""Contents of values, which are compared beside their identity: bytes, states, members."""

import random
from array import array
from collections import deque
from collections.abc import Callable, Iterable
from functools import partial
from os import environ
from typing import Any

import attrs
import numpy as np

from shardcore.binding.capture.python_state.objects import CACHED, is_of
from shardcore.domain.capture import NotCaptured

_PARTS_OF_ARRAY = (np.ndarray.shape, np.ndarray.dtype, np.ndarray.strides)
# The most bytes of arrays and the like that one guard compares before each step.
MOST_BYTES = 8 * 2**20


@attrs.define
class Budget:
    """The bytes that a guard may still compare."""

    left: int = MOST_BYTES

    def take(self, count: int, name: str) -> None:
        """Takes `count` bytes for the value `name`.

        Raises:
            NotCaptured: If too few are left.
        """
        self.left -= count
        if self.left < 0:
            raise NotCaptured(
                f"it reads {name}, which is an array of {count} bytes: a guard compares "
                f"{MOST_BYTES // 2**20} MiB at most. Make it a tensor, or a variable of the layer"
            )


def content_of(value: Any, name: str, budget: Budget) -> Callable[[], Any] | None:
    """Returns a function that copies the content of `value`; None where identity is enough.

    Args:
        value: Any object.
        name: What it is, for messages.
        budget: The bytes that may still be compared.

    Raises:
        NotCaptured: If it is an array of Python objects, or too large.
    """
    if is_of(value, np.ndarray):
        if value.dtype.hasobject:
            raise NotCaptured(
                f"it reads {name}, which is an array of Python objects: make it a list, a tensor, "
                "or a variable of the layer"
            )
        budget.take(value.nbytes, name)
        return partial(_array_content, value)
    if is_of(value, bytearray, array, memoryview, np.void):  # the last is a record of an array
        budget.take(memoryview(value).nbytes, name)
        return partial(_buffer_content, value)
    if is_of(value, np.random.Generator):
        return lambda: repr(value.bit_generator.state)
    if is_of(value, np.random.BitGenerator):
        return lambda: repr(value.state)
    if is_of(value, np.random.RandomState):
        return lambda: repr(value.get_state())
    if is_of(value, random.Random):
        return partial(random.Random.getstate, value)
    if is_of(value, CACHED):
        return partial(_cache_content, value)
    if value is environ:
        return lambda: dict(value)
    return None


def _array_content(value: np.ndarray) -> tuple[Any, ...]:
    # By the base class: a subclass may hide these attributes.
    parts = [part.__get__(value) for part in _PARTS_OF_ARRAY]
    return np.ndarray.tobytes(value), *parts, np.ndarray.flags.__get__(value).num


def _buffer_content(value: Any) -> bytes:
    return memoryview(value).tobytes()


def _cache_content(function: Any) -> tuple[int, int]:
    """Returns facts of an `lru_cache` that differ after it kept or dropped a value."""
    facts = function.cache_info()
    return facts.misses, facts.currsize


def members_reader(container: Any) -> Callable[[], Iterable[Any]]:
    """Returns a function that iterates over the members of a container, by its base class.

    Those of a dict are its keys and values.
    """
    if is_of(container, dict):
        return partial(_entries, container)
    kinds = (list, tuple, set, frozenset, deque)
    kind = next(kind for kind in kinds if is_of(container, kind))
    return partial(kind.__iter__, container)


def _entries(container: dict[Any, Any]) -> list[Any]:
    return [*dict.keys(container), *dict.values(container)]


def identities(read: Callable[[], Iterable[Any]]) -> list[int]:
    """Returns the identity of each member."""
    return list(map(id, read()))
