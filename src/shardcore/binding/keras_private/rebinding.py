"""Replacement of names in Keras, and their restoration."""

import pkgutil
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import wraps
from types import ModuleType
from typing import Any

import keras
import torch

from shardcore.binding.keras_private.process import is_symbolic
from shardcore.binding.keras_private.table import PATCHES, Patch
from shardcore.binding.types import Original


def around(replacement: Callable[..., Any]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Returns a decorator by which a Keras function calls `replacement`, with itself first."""

    def decorate(original: Original) -> Callable[..., Any]:
        @wraps(original)
        def call(*args: object, **kwargs: object) -> Any:
            return replacement(original, *args, **kwargs)

        return call

    return decorate


def replace(patch: Patch, make: Callable[[Any], Any], undo: ExitStack) -> None:
    """Gives `patch` the value `make(original)`, until `undo` is closed."""
    holder, name = _holder(patch)
    original = getattr(holder, name)
    value = make(original)
    for place in _importers(original) if patch.everywhere else [holder]:
        if name in vars(place):
            undo.callback(setattr, place, name, vars(place)[name])
        else:  # a class that inherits it
            undo.callback(delattr, place, name)
        setattr(place, name, value)


def missing() -> list[str]:
    """Returns the names of the patch table that this Keras does not have."""
    return [patch.place for patch in PATCHES.values() if not _is_there(patch)]


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
    modules = [module for name, module in sys.modules.items() if name.partition(".")[0] == "keras"]
    return [m for m in modules if vars(m).get(original.__name__) is original]


@contextmanager
def repeating_shapes() -> Iterator[None]:
    """Lets `keras.ops.repeat` infer shapes on the meta device.

    That of Keras 3.15 gives itself a symbolic tensor, which it cannot convert. Keras then computes
    with the values of the variables, which a model that is built on the meta device has not.
    """

    def repeat(original: Original, x: Any, repeats: Any, axis: int | None = None) -> Any:
        if not is_symbolic():
            return original(x, repeats, axis=axis)
        x = keras.ops.convert_to_tensor(x)
        dtype = keras.backend.standardize_dtype(x.dtype)
        shape = keras.ops.repeat(keras.KerasTensor(x.shape, dtype), repeats, axis).shape
        return torch.empty(shape, dtype=x.dtype, device=x.device)

    patch = Patch("keras.src.backend.torch.numpy:repeat", "it infers no shapes on the meta device")
    with ExitStack() as undo:
        replace(patch, around(repeat), undo)
        yield
