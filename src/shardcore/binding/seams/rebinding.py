"""Replacement of names in Keras, and their restoration."""

import pkgutil
import sys
from collections.abc import Callable
from functools import partial, wraps
from types import ModuleType
from typing import Any

import attrs

from shardcore.binding.seams.table import Seam


def around(replacement: Callable[..., Any]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Returns a decorator by which a Keras function calls `replacement`, with itself first."""

    def replace(original: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(original)
        def call(*args: Any, **kwargs: Any) -> Any:
            return replacement(original, *args, **kwargs)

        return call

    return replace


@attrs.define
class Rebinding:
    """The replaced names, with their original values."""

    _undo: list[Callable[[], None]] = attrs.field(factory=list, init=False)

    def replace(self, seam: Seam, make: Callable[[Any], Any]) -> None:
        """Gives `seam` the value `make(original)`."""
        holder, name = _holder(seam)
        original = vars(holder)[name]
        value = make(original)
        for place in _importers(original) if seam.everywhere else [holder]:
            self._undo.append(partial(setattr, place, name, vars(place)[name]))
            setattr(place, name, value)

    def restore(self) -> None:
        """Restores every name, the last one first."""
        while self._undo:
            self._undo.pop()()


def _holder(seam: Seam) -> tuple[Any, str]:
    """Returns the module or class that holds the name, and the name in it."""
    module, _, path = seam.name.partition(":")
    within, _, name = path.rpartition(".")
    return pkgutil.resolve_name(f"{module}:{within}"), name


def _importers(original: Any) -> list[ModuleType]:
    """Returns the loaded Keras modules that hold `original` under its own name."""
    modules = [module for name, module in sys.modules.items() if name.partition(".")[0] == "keras"]
    return [m for m in modules if vars(m).get(original.__name__) is original]
