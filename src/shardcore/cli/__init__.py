"""The `shardcore` command: what is in use here, how a model could be laid out, whether it is so."""

import argparse
import importlib.util
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from shardcore import api, bootstrap
from shardcore.bootstrap import environment
from shardcore.cli.arguments import UsageError, parse_mesh, parse_option, parse_target, parser
from shardcore.domain.errors import ShardcoreError
from shardcore.reporting.errors import show_user_frames
from shardcore.reporting.status import Status
from shardcore.reporting.verification import Verification


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command.

    Args:
        arguments: The words after the program's name, by default those of this process.

    Returns:
        The exit code: 0 if all is as it should be, 1 if not, 2 for wrong usage.
    """
    words = parser()
    options = words.parse_args(arguments)
    try:
        return COMMANDS[options.command](options)
    except UsageError as error:
        words.exit(2, f"{words.prog}: error: {error}\n")
    except ShardcoreError as error:
        if bootstrap.is_installed() and bootstrap.installation().processes.world_size > 1:
            raise  # an uncaught error is what ends the other ranks
        words.exit(1, f"{words.prog}: {error}\n")
    except Exception:
        show_user_frames()  # as a rule it is an error of the script
        raise


def _status(options: argparse.Namespace) -> int:
    api.install(options.strategy)
    bootstrap.installation().binding.library.initialize()
    _show(api.status(), options)
    return 0


def _plan(options: argparse.Namespace) -> int:
    file, name = parse_target(options.target)
    mesh = parse_mesh(options.mesh, options.axes)
    settings = dict(map(parse_option, options.option))
    environment.choose_backend()
    plan = api.plan(load_function(file, name), mesh, options.policy, **settings)
    if options.python:
        print(plan.to_python(), end="")
    else:
        print(json.dumps(plan.to_dict(), indent=2) if options.json else plan)
    return 0


def _verify(options: argparse.Namespace) -> int:
    file, name = parse_target(options.target)
    api.install(options.strategy)
    report = api.verify(build_model(file, name))
    _show(report, options)
    return 0 if report.ok else 1


COMMANDS = {"status": _status, "plan": _plan, "verify": _verify}


def _show(result: Status | Verification, options: argparse.Namespace) -> None:
    if result.rank == 0:
        print(json.dumps(result.to_dict(), indent=2) if options.json else result)


def load_function(file: Path, name: str) -> Callable[[], Any]:
    """Runs a script, with its folder first on `sys.path`, and returns its function `name`.

    Raises:
        UsageError: If it is no Python file, or has no such function.
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
    function = getattr(module, name, None)
    if not callable(function):
        own = [key for key, value in vars(module).items() if _is_own_function(value, module_name)]
        raise UsageError(
            f"{module.__file__} has no function {name!r}; it has {', '.join(own) or 'none'}: "
            "name one that returns the model, FILE:FUNCTION"
        )
    found: Callable[[], Any] = function
    return found


def _is_own_function(value: object, module_name: str) -> bool:
    return callable(value) and getattr(value, "__module__", None) == module_name


def build_model(file: Path, name: str) -> Any:
    """Returns the Keras model that the function `name` of the script returns.

    Raises:
        UsageError: If there is no such function, or it returns anything else.
    """
    model = load_function(file, name)()
    kind = getattr(sys.modules.get("keras"), "Model", None)
    if kind is None or not isinstance(model, kind):
        raise UsageError(
            f"{name}() of {file.resolve()} returned {type(model).__name__}, expected a "
            "keras.Model that is built: does it end in 'return model'?"
        )
    if not model.built:
        raise UsageError(
            f"{name}() of {file.resolve()} returned a model that is not built, so it has no "
            "variables yet: give it an Input, call it on a batch, or call model.build(shape)"
        )
    return model
