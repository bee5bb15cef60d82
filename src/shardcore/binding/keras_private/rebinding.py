"""Replacement of names in Keras, and their restoration."""

import pkgutil
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import wraps
from types import ModuleType
from typing import Any

from shardcore.binding.keras_private.table import PATCHES, WITHOUT_VALUES, Patch
from shardcore.binding.types import Original


def wrap_calls(
    replacement: Callable[..., object],
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Returns a decorator by which a Keras function calls `replacement`, with itself first."""

    def decorate(original: Original) -> Callable[..., Any]:
        @wraps(original)
        def call(*args: object, **kwargs: object) -> Any:
            return replacement(original, *args, **kwargs)

        return call

    return decorate


def replace(patch: Patch, make: Callable[[Any], object], undo: ExitStack) -> None:
    """Gives `patch` the value `make(original)`, until `undo` is closed."""
    holder, name = _holder(patch)
    original = getattr(holder, name)
    value = make(original)
    for owner in _importers(original) if patch.everywhere else [holder]:
        if name in vars(owner):
            undo.callback(setattr, owner, name, vars(owner)[name])
        else:  # a class that inherits it
            undo.callback(delattr, owner, name)
        setattr(owner, name, value)


@contextmanager
def wrap_layer_calls(call: Callable[..., object]) -> Iterator[None]:
    """Calls `call(original, layer, *args, **kwargs)` for each call of a layer in the context."""
    with ExitStack() as undo:
        replace(PATCHES["Layer.__call__"], wrap_calls(call), undo)
        yield


def missing() -> list[str]:
    """Returns the names of the patch table that this Keras does not have."""
    patches = [*PATCHES.values(), *WITHOUT_VALUES.values()]
    return [patch.place for patch in patches if not _is_there(patch)]


def _is_there(patch: Patch) -> bool:
    try:
        holder, name = _holder(patch)
    except (ImportError, AttributeError):
        return False
    return hasattr(holder, name)


def _holder(patch: Patch) -> tuple[Any, str]:
    """Returns the module or class that has the name, and the name in it."""
    module, _, path = patch.place.partition(":")
    within, _, name = path.rpartition(".")
    return pkgutil.resolve_name(f"{module}:{within}"), name


def _importers(original: Original) -> list[ModuleType]:
    """Returns the loaded Keras modules that hold `original` under its own name."""
    modules = [sys.modules[name] for name in list(sys.modules) if f"{name}.".startswith("keras.")]
    return [module for module in modules if vars(module).get(original.__name__) is original]
