"""Names that are replaced, and put back."""

import importlib
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import attrs

from shardcore.binding.seams.table import Seam


@attrs.define
class Rebinding:
    """Names that have been replaced, and what they were."""

    _undo: list[Callable[[], None]] = attrs.field(factory=list, init=False)

    def replace(self, seam: Seam, make: Callable[[Any], Any]) -> None:
        """Give `seam` the value `make(original)`."""
        holder, name = _holder(seam)
        original = vars(holder)[name]
        value = make(original)
        for place in _importers(original) if seam.everywhere else [holder]:
            self._set(place, name, value, vars(place)[name])

    def _set(self, holder: Any, name: str, value: Any, original: Any) -> None:
        setattr(holder, name, value)
        self._undo.append(lambda: setattr(holder, name, original))

    def restore(self) -> None:
        """Put every name back, the last one first."""
        while self._undo:
            self._undo.pop()()


def _holder(seam: Seam) -> tuple[Any, str]:
    """The module or class that holds the name, and the name in it."""
    holder: Any = importlib.import_module(seam.module)
    *classes, name = seam.name.split(".")
    for each in classes:
        holder = getattr(holder, each)
    return holder, name


def _importers(original: Any) -> list[ModuleType]:
    """The loaded Keras modules that hold `original` under its own name."""
    modules = [module for name, module in sys.modules.items() if name.partition(".")[0] == "keras"]
    return [m for m in modules if vars(m).get(original.__name__) is original]
