"""Names that are replaced, and put back."""

import pkgutil
import sys
from collections.abc import Callable
from functools import partial, wraps
from types import ModuleType
from typing import Any

import attrs

from shardcore.binding.seams.table import Seam


def around(replacement: Callable[..., Any]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Returns what makes a function of Keras call `replacement`, with itself as first argument."""

    def replace(original: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(original)
        def call(*args: Any, **kwargs: Any) -> Any:
            return replacement(original, *args, **kwargs)

        return call

    return replace


@attrs.define
class Rebinding:
    """Names that have been replaced, and what they were."""

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
        """Puts every name back, the last one first."""
        while self._undo:
            self._undo.pop()()


def _holder(seam: Seam) -> tuple[Any, str]:
    """The module or class that holds the name, and the name in it."""
    module, _, path = seam.name.partition(":")
    within, _, name = path.rpartition(".")
    return pkgutil.resolve_name(f"{module}:{within}"), name


def _importers(original: Any) -> list[ModuleType]:
    """The loaded Keras modules that hold `original` under its own name."""
    modules = [module for name, module in sys.modules.items() if name.partition(".")[0] == "keras"]
    return [m for m in modules if vars(m).get(original.__name__) is original]
