"""Replacement of names in Keras, and their restoration."""

import pkgutil
import sys
from collections.abc import Callable
from contextlib import ExitStack
from functools import wraps
from types import ModuleType
from typing import Any

from shardcore.binding.seams.table import SEAMS, Seam
from shardcore.binding.types import Original


def around(replacement: Callable[..., Any]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Returns a decorator by which a Keras function calls `replacement`, with itself first."""

    def decorate(original: Original) -> Callable[..., Any]:
        @wraps(original)
        def call(*args: object, **kwargs: object) -> Any:
            return replacement(original, *args, **kwargs)

        return call

    return decorate


def replace(seam: Seam, make: Callable[[Any], Any], undo: ExitStack) -> None:
    """Gives `seam` the value `make(original)`, until `undo` is closed."""
    holder, name = _holder(seam)
    original = getattr(holder, name)
    value = make(original)
    for place in _importers(original) if seam.everywhere else [holder]:
        if name in vars(place):
            undo.callback(setattr, place, name, vars(place)[name])
        else:  # a class that inherits it
            undo.callback(delattr, place, name)
        setattr(place, name, value)


def missing() -> list[str]:
    """Returns the names of the seam table that this Keras does not have."""
    return [seam.place for seam in SEAMS.values() if not _is_there(seam)]


def _is_there(seam: Seam) -> bool:
    try:
        holder, name = _holder(seam)
    except (ImportError, AttributeError):
        return False
    return hasattr(holder, name)


def _holder(seam: Seam) -> tuple[Any, str]:
    """Returns the module or class that has the name, and the name in it."""
    module, _, path = seam.place.partition(":")
    within, _, name = path.rpartition(".")
    return pkgutil.resolve_name(f"{module}:{within}"), name


def _importers(original: Original) -> list[ModuleType]:
    """Returns the loaded Keras modules that hold `original` under its own name."""
    modules = [module for name, module in sys.modules.items() if name.partition(".")[0] == "keras"]
    return [m for m in modules if vars(m).get(original.__name__) is original]
