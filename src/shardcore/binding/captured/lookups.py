"""Lookups that a guard repeats before each step: attributes, entries, variables of functions."""

from collections.abc import Callable
from typing import Any, Protocol

import attrs


class Holder(Protocol):
    """A dict, or what is asked like one."""

    def get(self, key: Any, /) -> Any:
        """Returns what is held under `key` now, None if nothing is."""
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
        """The value that is held there now; None if there is none."""
        return self.holder.get(self.key)


@attrs.frozen
class Referent:
    """A slot, a weak reference, a context variable or the cell of a closure.

    Args:
        read: Returns it; raises ValueError or AttributeError where there is none.
    """

    read: Callable[[], Any]

    def get(self, key: str, /) -> Any:
        """Returns its value now."""
        try:
            return self.read()
        except (ValueError, AttributeError):
            return None
