"""Checks of the entries that plug-ins offer."""

import re
from collections.abc import Callable

import attrs

from shardcore.domain.errors import PluginError


@attrs.frozen
class Kind:
    """The values that a field may have.

    Args:
        expected: They in words, for the error.
        holds: Returns whether a value is one of them.
    """

    expected: str
    holds: Callable[[object], bool]


TEXT = Kind("str", lambda value: isinstance(value, str))
BOOL = Kind("bool", lambda value: isinstance(value, bool))
INT = Kind("int", lambda value: type(value) is int)
COUNT = Kind("an int of 1 or more", lambda value: type(value) is int and value >= 1)
INT_OR_NONE = Kind("int or None", lambda value: value is None or type(value) is int)
FUNCTION = Kind("a function", callable)
NAME = Kind(
    "small letters, digits, - and _, a letter first",
    lambda value: isinstance(value, str) and re.fullmatch(r"[a-z][a-z0-9_-]*", value) is not None,
)


def check(entry: object, **kinds: Kind) -> None:
    """Raises a PluginError for the first field of `entry` that is of another kind."""
    for field, kind in kinds.items():
        value = getattr(entry, field)
        if not kind.holds(value):
            raise PluginError(
                f"{type(entry).__name__}({field}=...): expected {kind.expected}, got {value!r}",
                got=repr(value),
            )
