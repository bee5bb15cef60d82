"""The `shardcore` command: what is in use here, how a model could be laid out, whether it is so."""

import argparse
import json
from collections.abc import Callable, Sequence

from shardcore import api, bootstrap
from shardcore.bootstrap import environment
from shardcore.cli.arguments import parse_mesh, parse_option, parse_target, parser
from shardcore.cli.script import UsageError, build_model, find_function, load
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
    words = parser({"status": _status, "plan": _plan, "verify": _verify})
    options = words.parse_args(arguments)
    command: Callable[[argparse.Namespace], int] = options.command
    try:
        return command(options)
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
    plan = api.plan(find_function(load(file), name), mesh, options.policy, **settings)
    if options.python:
        print(plan.to_python(), end="")
    else:
        print(json.dumps(plan.to_dict(), indent=2) if options.json else plan)
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
