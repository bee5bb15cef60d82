"""The `shardcore` command: prints the strategy, and plans, explains and verifies a model."""

import argparse
import json
import os
import sys
from collections.abc import Callable, Sequence
from contextlib import redirect_stdout
from pathlib import Path

from shardcore import api, bootstrap, plan_api
from shardcore.bootstrap.cost import machines
from shardcore.cli import checkpoints, plans, scripts
from shardcore.cli.arguments import (
    DEFAULT_POLICY,
    UsageError,
    parse_mesh,
    parse_option,
    parse_target,
    parser,
)
from shardcore.cli.scripts import BATCH, build_model, function_of, load_script
from shardcore.domain.errors import ShardcoreError, printable
from shardcore.reporting.cost.machine import MachineReport
from shardcore.reporting.errors import show_user_frames
from shardcore.reporting.inspection.explanation import Explanation
from shardcore.reporting.inspection.verification import Verification
from shardcore.reporting.status import Status


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command.

    Args:
        arguments: The words after the program's name, by default those of this process.

    Returns:
        The exit code: 0 if all is as it should be, 1 if not, 2 for wrong usage.
    """
    try:
        return _run(arguments)
    finally:
        _print("")


def _run(arguments: Sequence[str] | None) -> int:
    # Only the result goes to standard output: not what plug-ins, Keras and the script print.
    with redirect_stdout(sys.stderr):
        words = parser()
    options = words.parse_args(arguments)
    try:
        with redirect_stdout(sys.stderr):
            code, result = COMMANDS[options.command](options)
        _print(result)
        return code
    except UsageError as error:
        words.exit(2, printable(f"{words.prog}: error: {error}\n"))
    except ShardcoreError as error:
        if bootstrap.is_installed() and bootstrap.installation().processes.has_others:
            raise  # an uncaught error is what ends the other ranks
        words.exit(1, printable(f"{words.prog}: {error}\n"))
    except Exception:
        show_user_frames()  # as a rule it is an error of the script
        raise


def _print(text: str) -> None:
    """Prints `text`; a reader that has gone, such as `head`, is no error."""
    try:
        sys.stdout.write(printable(text))
        sys.stdout.flush()
    except BrokenPipeError:
        # The interpreter flushes once more when it exits.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _status(options: argparse.Namespace) -> tuple[int, str]:
    api.install(options.strategy)
    bootstrap.installation().binding.library.initialize()
    return 0, _result_text(api.status(), options)


def _explain(options: argparse.Namespace) -> tuple[int, str]:
    file, name = parse_target(options.target)
    mesh = None if options.mesh is None else parse_mesh(options.mesh, options.axes)
    settings = dict(map(parse_option, options.option))
    api.install(options.strategy)
    scripts.simulate_for(mesh, options)
    script = load_script(file)
    batch = function_of(script, options.batch, BATCH)
    if mesh is not None:
        policy = options.policy or DEFAULT_POLICY
        plan_api.plan(function_of(script, name), mesh, policy, **settings).distribute()
    sessions = bootstrap.installation().binding.sessions
    planned = sessions.current()
    model = build_model(script, name)
    if mesh is not None and sessions.current() is not planned:
        raise UsageError(
            f"{name}() sets a distribution, and --mesh lays the model out by a policy: leave out "
            "--mesh and give --ranks, or take set_distribution(...) out of the function"
        )
    explanation = api.explain(model, batch(), options.step)
    if options.save and explanation.rank == 0:
        explanation.save(options.save)
    before = explanation.rank == 0 and not options.json and explanation.layouts
    return 0, (f"{before}\n\n" if before else "") + _result_text(explanation, options)


def _verify(options: argparse.Namespace) -> tuple[int, str]:
    file, name = parse_target(options.target)
    api.install(options.strategy)
    report = api.verify(build_model(load_script(file), name))
    return 0 if report.ok else 1, _result_text(report, options)


def _measure(options: argparse.Namespace) -> tuple[int, str]:
    api.install()
    file = Path(options.file)
    machine = machines.measure(file.stem)
    if bootstrap.installation().processes.rank != 0:
        return 0, ""
    machines.write(machine, file)
    text = json.dumps(machine.to_dict(), indent=2)
    return 0, f"{text}\n" if options.json else f"{MachineReport(machine)}\n"


# Each returns the exit code, and what it prints.
COMMANDS: dict[str, Callable[[argparse.Namespace], tuple[int, str]]] = {
    "status": _status,
    "plan": plans.run,
    "explain": _explain,
    "verify": _verify,
    "measure": _measure,
    "checkpoint": checkpoints.run,
}


def _result_text(result: Status | Explanation | Verification, options: argparse.Namespace) -> str:
    """Formats a result; empty on a rank that does not print."""
    if result.rank != 0:
        return ""
    return f"{json.dumps(result.to_dict(), indent=2) if options.json else result}\n"
