"""The scripts of users, whose functions return models and batches."""

import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from shardcore.cli.arguments import UsageError

BATCH = "the global batch, --batch FUNCTION"


def load_script(file: Path) -> ModuleType:
    """Runs a script, with its folder first on `sys.path`, and returns its module.

    Raises:
        UsageError: If it is no Python file.
    """
    module_name = file.stem
    spec = importlib.util.spec_from_file_location(module_name, file.resolve())
    if spec is None or spec.loader is None:
        raise UsageError(f"{str(file)!r} is no Python file: its name should end in .py")
    module = importlib.util.module_from_spec(spec)
    sys.path.insert(0, str(file.resolve().parent))
    # Pickle and Keras' serialization look there for the classes of the script.
    sys.modules[module_name] = module
    spec.loader.exec_module(module)
    return module


def function_of(
    script: ModuleType, name: str, returned: str = "the model, FILE:FUNCTION"
) -> Callable[[], Any]:
    """Returns the function `name` of a script.

    Args:
        script: The module.
        name: The function's name.
        returned: What it returns, and how it is named on the command line, for the error.

    Raises:
        UsageError: If there is none.
    """
    function = getattr(script, name, None)
    if not callable(function):
        own = [
            key for key, member in vars(script).items() if _is_own_function(member, script.__name__)
        ]
        raise UsageError(
            f"{script.__file__} has no function {name!r}; it has {', '.join(own) or 'none'}: "
            f"name one that returns {returned}"
        )
    checked: Callable[[], Any] = function
    return checked


def _is_own_function(value: object, module_name: str) -> bool:
    return callable(value) and getattr(value, "__module__", None) == module_name


def build_model(script: ModuleType, name: str) -> Any:
    """Returns the Keras model that the function `name` of a script returns.

    Raises:
        UsageError: If there is no such function, or it returns anything else.
    """
    model = function_of(script, name)()
    kind = getattr(sys.modules.get("keras"), "Model", None)
    if kind is None or not isinstance(model, kind):
        raise UsageError(
            f"{name}() of {script.__file__} returned {type(model).__name__}, expected a "
            "keras.Model that is built: does it end in 'return model'?"
        )
    if not model.built:
        raise UsageError(
            f"{name}() of {script.__file__} returned a model that is not built, so it has no "
            "variables yet: give it an Input, call it on a batch, or call model.build(shape)"
        )
    return model
