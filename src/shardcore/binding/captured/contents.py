"""Values that a guard compares before each step: where they are looked up, and their content."""

import random
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from itertools import repeat
from operator import itemgetter
from os import environ
from types import MappingProxyType
from typing import Any, Protocol

import attrs
import numpy as np
import torch

from shardcore.binding.captured.functions import is_users

# A larger content takes too long to compare before each step.
_MOST_BYTES = 2**16
# The value of an attribute that is not there: its class may have one.
ABSENT = object()
# A subclass may make a value for a key that it lacks.
_PLAIN_DICTS = (dict, MappingProxyType)


class Holder(Protocol):
    """A dict, or an object that is read like one."""

    def get(self, key: Any, default: Any, /) -> Any:
        """Returns the present value of `key`, `default` if there is none."""
        ...


@attrs.frozen
class GuardedAttribute:
    """An attribute, an entry of a dict or a variable that the next step looks up again.

    Args:
        holder: The dict, or what is asked like one.
        key: The key in it.
        name: Whose it is, for people: "attribute 'rate' of Dropout 'dropout_1'".
    """

    holder: Holder
    key: Any
    name: str

    @property
    def value(self) -> Any:
        """The present value; `ABSENT` if there is none."""
        return self.holder.get(self.key, ABSENT)


@attrs.frozen
class Referent:
    """A slot, a weak reference, a context variable or the cell of a closure.

    Args:
        read: Returns it; raises ValueError or AttributeError where there is none.
    """

    read: Callable[[], Any]

    def get(self, key: str, default: Any, /) -> Any:
        """Returns its value now, `default` if there is none."""
        try:
            return self.read()
        except (ValueError, AttributeError):
            return default


def attribute_of(owner: Any, key: str) -> Holder:
    """Returns the holder of one attribute, which may be a slot."""
    return Referent(partial(getattr, owner, key))


def members(container: Any) -> Any:
    """Returns a view of the members of a list, set or tuple, and of the values of a dict."""
    return container.values() if isinstance(container, dict) else container


def overridable(kind: type, owner: Any) -> Iterator[str]:
    """Yields the attributes of a user class that its object `owner` may get, and has not."""
    if is_users(kind.__module__) and hasattr(owner, "__dict__"):
        yield from (key for key in vars(kind) if key[:2] != "__" and key not in vars(owner))


def reader_of(holder: Holder, keys: list[Any]) -> Callable[[], Iterable[Any]]:
    """Returns a function that reads several keys of one holder: in one call if it is a plain dict.

    For a dict it calls no function of Python: a step has thousands of lookups. Its KeyError says
    that a key has gone.

    Example:
        >>> reader_of({"rate": 0.5, "seed": None}, ["rate", "seed"])()
        (0.5, None)
    """
    if isinstance(holder, dict | MappingProxyType) and _has_plainly(holder, keys):
        return partial(itemgetter(*keys), holder)
    return partial(map, holder.get, keys, repeat(ABSENT))


def _has_plainly(holder: Mapping[Any, Any], keys: list[Any]) -> bool:
    """Returns whether `itemgetter` gives a tuple of these keys, and makes no value for any."""
    return len(keys) > 1 and type(holder) in _PLAIN_DICTS and all(key in holder for key in keys)


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


def why_not_comparable(value: object) -> str:
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
