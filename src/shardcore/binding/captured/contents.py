"""Values whose content may change in place, so that comparing identities is not enough."""

import random
from collections.abc import Callable
from os import environ
from typing import Any

import numpy as np
import torch

from shardcore.binding.captured.functions import is_users

# A larger content takes too long to compare before each step.
_MOST_BYTES = 2**16


def content_of(value: Any) -> Callable[[], Any] | None:
    """Returns a function that copies the content of `value`; None where identity is enough.

    An array, and whatever else has a buffer, has bytes; a random generator has a state.
    """
    if isinstance(value, str | bytes | torch.Tensor):
        return None
    if isinstance(value, np.ndarray):
        return value.tobytes if _is_small_array(value) else None
    if isinstance(value, np.random.Generator):
        return lambda: repr(value.bit_generator.state)
    if isinstance(value, np.random.RandomState):
        return lambda: repr(value.get_state())
    if isinstance(value, random.Random):
        return value.getstate
    if value is environ:
        return lambda: dict(value)
    try:
        view = memoryview(value)
    except TypeError:
        return None
    return view.tobytes if view.nbytes <= _MOST_BYTES else None


def why_not_comparable(value: Any) -> str:
    """Returns why a change in the content of `value` cannot be seen; empty if it can."""
    kind = f"{type(value).__module__}.{type(value).__qualname__}"
    if isinstance(value, type | torch.Tensor):
        return ""
    if isinstance(value, np.ndarray) and not _is_small_array(value):
        size = "of Python objects" if value.dtype.hasobject else f"of {value.nbytes} bytes"
        return f"is an array {size}: make it a tensor, or a variable of the layer"
    is_opaque = not hasattr(value, "__dict__") and not hasattr(value, "__slots__")
    is_of_library = not is_users(type(value).__module__)
    if hasattr(value, "__next__") and (is_opaque or is_of_library):
        return f"is an iterator ({kind}), whose place cannot be read"
    if is_opaque and not is_of_library and content_of(value) is None:
        return f"is a {kind}, whose content cannot be read"
    return ""


def _is_small_array(value: np.ndarray) -> bool:
    return value.nbytes <= _MOST_BYTES and not value.dtype.hasobject
