"""Functions by which a guard reads state that is no attribute: in C, in a cell, of a thread."""

import decimal
import logging
import os
import threading
import warnings
from collections.abc import Callable
from functools import partial
from operator import attrgetter
from typing import Any

import numpy as np
import torch

from shardcore.binding import keras_private
from shardcore.binding.capture.python_state.objects import is_of
from shardcore.binding.capture.python_state.watched import WatchedValues

FUNCTION_STATE = attrgetter("__code__", "__defaults__", "__kwdefaults__")
FUNCTION_TEXTS = attrgetter("__name__", "__qualname__", "__doc__", "__module__")
CELL_CONTENTS = attrgetter("cell_contents")
_OF_TENSOR = attrgetter("dtype", "shape", "retains_grad")
_PARTS_OF_EXCEPTION = tuple(
    vars(BaseException)[name]
    for name in ("args", "__cause__", "__context__", "__suppress_context__")
)


# Settings by the names of which the user's code must have one: how to read them, and their title.
SETTINGS: tuple[tuple[frozenset[str], Callable[[], object], str], ...] = (
    (
        frozenset({"environ", "getenv", "get_exec_path", "getenvb"}),
        lambda: dict(os.environ),
        "os.environ",
    ),
    (
        frozenset({"FloatingPointError"}),
        lambda: repr(np.geterr()),
        "NumPy's handling of errors",
    ),
    (
        frozenset({"warn", "catch_warnings"}),
        lambda: list(warnings.filters),
        "the filters of warnings",
    ),
    (
        frozenset({"current_thread"}),
        lambda: threading.current_thread().name,
        "the name of this thread",
    ),
)


def state_in_c(value: Any, name: str, watched: WatchedValues) -> None:
    """Adds to `watched` what an object of C has that is no attribute in its `__dict__`."""
    if is_of(value, BaseException):
        watched.add_results(partial(parts_of_exception, value), name)
    if is_of(value, torch.Generator):
        watched.add_content(value.initial_seed, f"the seed of {name}")
    if is_of(value, np.flatiter):
        watched.add_content(partial(getattr, value, "index"), f"the index of {name}")


def geometry(tensor: torch.Tensor, name: str, watched: WatchedValues) -> None:
    """Adds to `watched` what `tensor.data = other`, `t_()` and `set_()` change of a tensor."""
    watched.add_content(partial(_OF_TENSOR, tensor), f"the dtype or shape of {name}")
    if tensor.layout is torch.strided:
        watched.add_content(tensor.stride, f"the strides of {name}")
        watched.add_content(tensor.storage_offset, f"the memory of {name}")


def read_or_none(holder: Any, owner: Any) -> Any:
    """Returns what a cell or a slot holds; None if it is empty."""
    try:
        return holder.cell_contents if owner is None else holder.__get__(owner)
    except (ValueError, AttributeError):
        return None


def identity(reference: Any) -> int | None:
    """Returns the identity of what a weak reference refers to; None if that was freed."""
    target = reference()
    return None if target is None else id(target)


def class_name(kind: type) -> str:
    """Returns both names of a class, without running code of its metaclass."""
    return " ".join(vars(type)[name].__get__(kind) for name in ("__name__", "__qualname__"))


def parts_of_exception(error: BaseException) -> tuple[Any, ...]:
    """Returns what an exception holds, whatever attributes its class has."""
    return tuple(part.__get__(error) for part in _PARTS_OF_EXCEPTION)


def decimal_context() -> str:
    """Returns the settings of decimal numbers on this thread."""
    return repr(decimal.getcontext())


def level(logger: logging.Logger) -> tuple[Any, ...]:
    """Returns whether a logger writes, and from which level on."""
    return logger.getEffectiveLevel(), logger.disabled, logging.root.manager.disable


def title_of(owner: Any, attributes: dict[str, Any], name: str) -> str:
    """Returns what messages call an object: its class and its own name, if it has one."""
    own = attributes.get("name")
    return f"{type(owner).__name__} {own!r}" if isinstance(own, str) else name


def count_attributes(attributes: dict[str, Any]) -> int:
    """Returns the number of attributes of a model, without those in which it notes its runs."""
    return len(attributes) - len(keras_private.RUNS_NOTED & attributes.keys())
