"""Loads the user's script and builds its model."""

import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from shardcore.domain.errors import ShardcoreError


class UsageError(ShardcoreError, ValueError):
    """The command line asks for something that cannot be done."""


def load(file: Path) -> ModuleType:
    """Runs a script as a module, with its folder first on `sys.path`, as under `python FILE`.

    Raises:
        UsageError: If it is no Python file.
    """
    name = file.stem
    spec = importlib.util.spec_from_file_location(name, file.resolve())
    if spec is None or spec.loader is None:
        raise UsageError(f"{str(file)!r} is no Python file: its name should end in .py")
    module = importlib.util.module_from_spec(spec)
    sys.path.insert(0, str(file.resolve().parent))
    # Pickle and Keras' serialization look there for the classes of the script.
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def find_function(module: ModuleType, name: str) -> Callable[[], Any]:
    """Returns the function `name` of the module.

    Raises:
        UsageError: If there is none.
    """
    function = getattr(module, name, None)
    if not callable(function):
        there = [key for key, value in vars(module).items() if _is_own_function(value, module)]
        raise UsageError(
            f"{module.__file__} has no function {name!r}; it has {', '.join(there) or 'none'}: "
            "name one that returns the model, FILE:FUNCTION"
        )
    found: Callable[[], Any] = function
    return found


def build_model(module: ModuleType, name: str) -> Any:
    """Returns the Keras model that the function `name` of the module returns.

    Raises:
        UsageError: If there is no such function, or it returns anything else.
    """
    model = find_function(module, name)()
    kind = getattr(sys.modules.get("keras"), "Model", None)
    if kind is None or not isinstance(model, kind):
        raise UsageError(
            f"{name}() of {module.__file__} returned {type(model).__name__}, expected a "
            "keras.Model that is built: does it end in 'return model'?"
        )
    if not model.built:
        raise UsageError(
            f"{name}() of {module.__file__} returned a model that is not built, so it has no "
            "variables yet: give it an Input, call it on a batch, or call model.build(shape)"
        )
    return model


def _is_own_function(value: object, module: ModuleType) -> bool:
    return callable(value) and getattr(value, "__module__", None) == module.__name__
