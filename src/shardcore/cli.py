"""The `shardcore` command: what is in use here, and whether a model is stored as it should be."""

import argparse
import importlib.util
import json
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from shardcore import api, bootstrap
from shardcore.domain.errors import ShardcoreError
from shardcore.reporting.status import Status
from shardcore.reporting.verification import Verification

DEFAULT_FUNCTION = "build"

EXAMPLES = """\
examples:
  shardcore status                               which strategy is used here, and why
  shardcore verify model.py                      build() of model.py, on one device
  shardcore verify model.py:make --json          another function, as JSON
  torchrun --nproc_per_node=2 --module shardcore verify model.py:build
                                                 on two ranks; rank 0 prints the report
"""

VERIFY = """\
Calls a function of your script and checks every variable of the model that it returns: its
layout, and that every rank stores its own shard of the whole value and nothing else.
"""

EPILOG = f"""\
The script sets the distribution, and has a function that returns the built model:

  import keras

  def {DEFAULT_FUNCTION}():
      keras.distribution.set_distribution(keras.distribution.DataParallel())
      return keras.Sequential([keras.Input((8,)), keras.layers.Dense(4)])

shardcore is installed before the script is run, which is not run as "__main__".

exit code: 0 if all is as it should be, 1 if not, 2 for wrong usage.

{EXAMPLES}"""


class UsageError(Exception):
    """What was asked for on the command line cannot be done."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command.

    Args:
        arguments: The words after the program's name, by default those of this process.

    Returns:
        The exit code: 0 if all is as it should be, 1 if not, 2 for wrong usage.
    """
    parser = _parser()
    options = parser.parse_args(arguments)
    command: Callable[[argparse.Namespace], int] = options.command
    try:
        return command(options)
    except UsageError as error:
        parser.exit(2, f"{parser.prog}: error: {error}\n")
    except ShardcoreError as error:
        if _world_size() > 1:
            raise  # an uncaught error is what ends the other ranks
        parser.exit(1, f"{parser.prog}: {error}\n")


def _world_size() -> int:
    if not bootstrap.is_installed():
        return 1
    return int(bootstrap.installation().processes.world_size)


def _parser() -> argparse.ArgumentParser:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(
        prog="shardcore",
        description="keras.distribution for Keras 3 on PyTorch.",
        epilog=EXAMPLES,
        formatter_class=raw,
    )
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument("--json", action="store_true", help="print data instead of a table")
    common.add_argument(
        "--strategy", default="auto", help='"auto" (default), "dtensor", "single", or another\'s'
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    about = "show the strategy in use, and why not the others, the devices, the versions"
    status = commands.add_parser("status", parents=[common], help=about, description=about)
    status.set_defaults(command=_status)
    verify = commands.add_parser(
        "verify",
        parents=[common],
        help="check that every rank stores its shards of a model",
        description=VERIFY,
        epilog=EPILOG,
        formatter_class=raw,
    )
    verify.add_argument(
        "target",
        metavar="FILE[:FUNCTION]",
        help=f"a Python script, and its function that returns the model ({DEFAULT_FUNCTION})",
    )
    verify.set_defaults(command=_verify)
    return parser


def _status(options: argparse.Namespace) -> int:
    api.install(options.strategy)
    bootstrap.installation().binding.library.initialize()
    _show(api.status(), options)
    return 0


def _verify(options: argparse.Namespace) -> int:
    file, name = parse_target(options.target)
    api.install(options.strategy)
    model = build_model(load(file), name)
    report = api.verify(model)
    _show(report, options)
    return 0 if report.ok else 1


def _show(result: Status | Verification, options: argparse.Namespace) -> None:
    if result.rank == 0:
        print(json.dumps(result.to_dict(), indent=2) if options.json else result)


def parse_target(target: str) -> tuple[Path, str]:
    """The file and the function that `FILE[:FUNCTION]` names.

    Raises:
        UsageError: If there is no such file, or the function has no name.
    """
    drive, path = os.path.splitdrive(target)
    path, colon, name = path.partition(":")
    file = Path(drive + path)
    if not file.is_file():
        raise UsageError(
            f"there is no file {str(file)!r}: give FILE[:FUNCTION], such as model.py:build"
        )
    if colon and not name.isidentifier():
        raise UsageError(
            f"{name!r} in {target!r} is no function's name: give FILE[:FUNCTION], such as "
            "model.py:build"
        )
    return file, name or DEFAULT_FUNCTION


def load(file: Path) -> ModuleType:
    """Run a script as a module, with its folder first on `sys.path`, as `python FILE` has it.

    Raises:
        UsageError: If it is no Python file.
    """
    name = file.stem
    spec = importlib.util.spec_from_file_location(name, file.resolve())
    if spec is None or spec.loader is None:
        raise UsageError(f"{str(file)!r} is no Python file: its name should end in .py")
    module = importlib.util.module_from_spec(spec)
    sys.path.insert(0, str(file.resolve().parent))
    # Where pickling and Keras' serialization look for the classes of the script.
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def build_model(module: ModuleType, name: str) -> Any:
    """The Keras model that the function `name` of the module returns.

    Raises:
        UsageError: If there is no such function, or it returns anything else.
    """
    function = getattr(module, name, None)
    if not callable(function):
        there = [key for key, value in vars(module).items() if _is_own_function(value, module)]
        raise UsageError(
            f"{module.__file__} has no function {name!r}; it has {', '.join(there) or 'none'}: "
            "name one that returns the model, FILE:FUNCTION"
        )
    model = function()
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


def _is_own_function(value: Any, module: ModuleType) -> bool:
    return callable(value) and getattr(value, "__module__", None) == module.__name__
