"""Replacement of names in Keras, and their restoration."""

import pkgutil
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import wraps
from types import ModuleType
from typing import Any

import attrs

from shardcore.binding.keras_private.patches import Patch, patches_of, replaces
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


def replace(patch: Patch, function: Callable[..., Any], undo: ExitStack) -> None:
    """Lets `function`, whose first parameter is the original, replace a name until `undo`."""
    holder, name = _holder(patch)
    original = getattr(holder, name)
    value = function(original) if patch.is_value else wrap_calls(function)(original)
    for owner in _importers(original) if patch.everywhere else [holder]:
        if name in vars(owner):
            undo.callback(setattr, owner, name, vars(owner)[name])
        else:  # a class that inherits it
            undo.callback(delattr, owner, name)
        setattr(owner, name, value)


@contextmanager
def replaced(*functions: Callable[..., Any]) -> Iterator[None]:
    """Opens a context in which functions replace the names that they declare."""
    with ExitStack() as undo:
        for function in functions:
            for patch in patches_of(function):
                if patch.is_needed:
                    replace(patch, function, undo)
        yield


@attrs.frozen
class _LayerCalls:
    """Calls `call(original, layer, *args, **kwargs)` for each call of a layer."""

    call: Callable[..., Any]

    @replaces("keras.src.layers.layer:Layer.__call__", reason="Follows the calls of layers.")
    def layer_call(self, original: Original, *args: object, **kwargs: object) -> Any:
        """Replaces `Layer.__call__`."""
        return self.call(original, *args, **kwargs)


def wrap_layer_calls(call: Callable[..., Any]) -> AbstractContextManager[None]:
    """Calls `call(original, layer, *args, **kwargs)` for each call of a layer in the context."""
    return replaced(_LayerCalls(call).layer_call)


def missing(patches: Iterable[Patch]) -> list[str]:
    """Returns the names of `patches` that this Keras does not have."""
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
