"""State beside the attributes of objects, and how a guard reads it: contents, cells, settings."""

import gc
import logging
import os
import random
import threading
from array import array
from collections import deque
from collections.abc import Callable, Iterable
from functools import partial
from io import BufferedWriter, FileIO, TextIOWrapper
from itertools import filterfalse
from operator import attrgetter
from types import CellType
from typing import Any

import attrs
import numpy as np
import torch

from shardcore.binding import keras_private
from shardcore.binding.capture.python_state.objects import attributes_of, is_of, wrapped
from shardcore.binding.capture.python_state.watched import WatchedValues
from shardcore.domain.capture import NotCaptured

FUNCTION_STATE = attrgetter("__code__", "__defaults__", "__kwdefaults__")
FUNCTION_TEXTS = attrgetter("__name__", "__qualname__", "__doc__", "__module__")
CELL_CONTENTS = attrgetter("cell_contents")
_OF_TENSOR = attrgetter("dtype", "shape", "retains_grad")
_PARTS_OF_EXCEPTION = tuple(
    vars(BaseException)[name]
    for name in ("args", "__cause__", "__context__", "__suppress_context__")
)
_OF_OUTPUT = attrgetter(
    *("closed", "encoding", "errors", "newlines", "line_buffering", "write_through")
)
_LOCKS = (type(threading.Lock()), type(threading.RLock()))
_MAXLEN: Any = vars(deque)["maxlen"]
_DOCUMENTATION: Any = vars(property)["__doc__"]
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
    """Chooses a function that copies the content of `value`; None where identity is enough.

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
    if value is os.environ:
        return lambda: dict(value)
    return None


def _array_content(value: np.ndarray) -> tuple[Any, ...]:
    # By the base class: a subclass may hide these attributes.
    parts = [part.__get__(value) for part in _PARTS_OF_ARRAY]
    return np.ndarray.tobytes(value), *parts, np.ndarray.flags.__get__(value).num


def _buffer_content(value: Any) -> bytes:
    return memoryview(value).tobytes()


def members_reader(container: Any) -> Callable[[], Iterable[Any]]:
    """Builds a function that iterates over a container, by its base class.

    Those of a dict are its keys and values.
    """
    if is_of(container, dict):
        return partial(_entries, container)
    kinds = (list, tuple, set, frozenset, deque)
    kind = next(kind for kind in kinds if is_of(container, kind))
    return partial(kind.__iter__, container)


def _entries(container: dict[Any, Any]) -> list[Any]:
    return [*dict.keys(container), *dict.values(container)]


def state_in_c(value: Any, name: str, watched: WatchedValues, *, shows_names: bool) -> None:
    """Adds to `watched` what an object of C has that is no attribute in its `__dict__`.

    Args:
        value: The object.
        name: What it is, for messages.
        watched: Gets what is compared.
        shows_names: Whether code may read the object as text.
    """
    if is_of(value, BaseException):
        watched.add_results(partial(_parts_of_exception, value), name)
    if is_of(value, torch.Generator):
        watched.add_content(value.initial_seed, f"the seed of {name}")
    if is_of(value, deque):
        watched.add_content(partial(_MAXLEN.__get__, value), f"the maxlen of {name}")
    if is_of(value, property):
        watched.add_results(partial(wrapped, value), f"the functions of {name}")
    if is_of(value, CellType):
        watched.add_result(partial(CELL_CONTENTS, value), name)
    if shows_names and is_of(value, *_LOCKS):
        watched.add_content(partial(repr, value), f"the state of {name}")
    if shows_names and is_of(value, property):
        watched.add_result(partial(_DOCUMENTATION.__get__, value), f"the docstring of {name}")
    if is_of(value, np.flatiter):
        watched.add_content(partial(getattr, value, "index"), f"the index of {name}")


def is_output(value: Any) -> bool:
    """Tells a file of text that code can write and not read, as `sys.stderr` is one.

    Functions of C that ask for the position or the size of a file are refused.

    Example:
        >>> import io
        >>> is_output(TextIOWrapper(BufferedWriter(io.BytesIO()))), is_output(io.StringIO())
        (True, False)
    """
    if type(value) is not TextIOWrapper:
        return False
    try:
        is_unbuffered = type(value.buffer) is FileIO and not value.buffer.readable()
        return is_unbuffered or type(value.buffer) is BufferedWriter
    except ValueError:  # it was detached, or closed
        return False


def state_of_output(file: TextIOWrapper) -> Any:
    """Reads what code can read of such a file."""
    try:
        return _OF_OUTPUT(file)
    except ValueError:  # it was detached
        return None


def geometry(tensor: torch.Tensor, name: str, watched: WatchedValues) -> None:
    """Adds to `watched` what `tensor.data = other`, `t_()` and `set_()` change of a tensor."""
    watched.add_content(partial(_OF_TENSOR, tensor), f"the dtype or shape of {name}")
    if tensor.layout is torch.strided:
        watched.add_content(tensor.stride, f"the strides of {name}")
        watched.add_content(tensor.storage_offset, f"the memory of {name}")


def read_or_none(holder: Any, owner: Any) -> Any:
    """Reads a cell, or a slot of `owner`; None if it is empty."""
    try:
        return holder.cell_contents if owner is None else holder.__get__(owner)
    except (ValueError, AttributeError):
        return None


def identity(reference: Any) -> int | None:
    """Reads the identity of the target of a weak reference; None if that was freed."""
    target = reference()
    return None if target is None else id(target)


def class_name(kind: type) -> str:
    """Reads both names of a class, without running code of its metaclass."""
    return " ".join(vars(type)[name].__get__(kind) for name in ("__name__", "__qualname__"))


def _parts_of_exception(error: BaseException) -> tuple[Any, ...]:
    """Reads the parts of an exception, whatever attributes its class has."""
    return tuple(part.__get__(error) for part in _PARTS_OF_EXCEPTION)


def level(logger: logging.Logger) -> tuple[Any, ...]:
    """Reads all on which it depends whether a logger writes."""
    return logger.getEffectiveLevel(), logger.disabled, logging.root.manager.disable


def title_of(owner: Any, attributes: dict[str, Any], name: str) -> str:
    """Names an object for messages: by its class and own name, if it has one."""
    own = attributes.get("name")
    return f"{type(owner).__name__} {own!r}" if isinstance(own, str) else name


def count_attributes(attributes: dict[str, Any]) -> int:
    """Counts the attributes of a model, without those in which it notes its runs."""
    return len(attributes) - len(keras_private.RUNS_NOTED & attributes.keys())


def cached_values(function: Any) -> list[Any]:
    """Lists what an `lru_cache` keeps, keys and values, in an order that calls do not change.

    A cache without a limit is a dict; one with a limit refers to keys and values besides.
    """
    own = attributes_of(function)
    parts = [part for part in gc.get_referents(function) if part is not own]
    dicts = [part for part in parts if type(part) is dict]
    keys_and_values = [part for pairs in dicts for pair in pairs.items() for part in pair]
    if any(map(_is_link, keys_and_values)):
        others = [part for part in parts if type(part) is not dict]
        keys_and_values = [*filterfalse(_is_link, keys_and_values), *others]
    return sorted(keys_and_values, key=id)


def _is_link(part: object) -> bool:
    return type(part).__name__ == "_lru_list_elem"
