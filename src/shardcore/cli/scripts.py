"""The scripts of users that commands run, and the ranks that a command simulates."""

import argparse
import importlib.util
import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from shardcore import bootstrap
from shardcore.cli.arguments import UsageError
from shardcore.domain.layouts.mesh import Mesh
from shardcore.domain.ranks.job import resolve_job

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
    """Looks up the function `name` of a script.

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
    """Calls the function `name` of a script, and checks that it returns a built Keras model.

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
            "variables yet: give it an Input, or call it on a batch"
        )
    return model


def simulate(ranks: int, option: str) -> None:
    """Simulates so many ranks, as `option` asks.

    Raises:
        UsageError: If a launcher started this process.
    """
    if resolve_job(environ=os.environ) is not None:
        raise UsageError(f"{option} simulates ranks, but a launcher started this one: leave it out")
    bootstrap.simulate(ranks)


def simulate_for(mesh: Mesh | None, options: argparse.Namespace) -> None:
    """Simulates the ranks of the mesh, or `--ranks` of them, if no launcher started ranks.

    Raises:
        UsageError: If the options do not fit together.
    """
    unused = [option for option in ("policy", "axes", "option") if getattr(options, option)]
    if mesh is None and unused:
        raise UsageError(f"--{unused[0]} goes with --mesh: give ranks by axes, such as --mesh 2x4")
    if options.ranks is not None and options.ranks < 1:
        raise UsageError(f"--ranks {options.ranks} is no number of ranks: give 1 or more")
    if options.ranks is not None:
        simulate(options.ranks, "--ranks")
    elif resolve_job(environ=os.environ) is None:
        bootstrap.simulate(mesh.size if mesh else 1)
