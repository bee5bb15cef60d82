"""The `shardcore` command: prints the strategy, and plans, explains and verifies a model."""

import argparse
import json
import os
import sys
from collections.abc import Callable, Sequence
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

from shardcore import api, bootstrap, plan_api
from shardcore.bootstrap.cost import auto, machines
from shardcore.cli import checkpoints, scripts
from shardcore.cli.arguments import (
    DEFAULT_BATCH,
    DEFAULT_POLICY,
    UsageError,
    parse_mesh,
    parse_option,
    parse_target,
    parser,
)
from shardcore.cli.scripts import BATCH, build_model, function_of, load_script
from shardcore.domain.errors import ShardcoreError, printable
from shardcore.domain.ranks.job import resolve_job
from shardcore.reporting.cost.ranking import MachineReport
from shardcore.reporting.errors import show_user_frames
from shardcore.reporting.inspection.explanation import Explanation
from shardcore.reporting.inspection.verification import Verification
from shardcore.reporting.status import Status


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command.

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


def _plan(options: argparse.Namespace) -> tuple[int, str]:
    if (options.policy == auto.NAME) != (options.devices is not None):
        raise UsageError("--policy auto goes with --devices N, the other policies with --mesh")
    return _plan_automatically(options) if options.devices is not None else _plan_on_mesh(options)


def _plan_automatically(options: argparse.Namespace) -> tuple[int, str]:
    unused = [option for option in ("axes", "option") if getattr(options, option)]
    if unused or options.memory is True:
        name = unused[0] if unused else "memory without a size"
        raise UsageError(f"--{name} is not for --policy auto: leave it out, or give a mesh")
    file, name = parse_target(options.target)
    api.install()
    script = load_script(file)
    has_rows = options.batch.isdecimal()
    plan = plan_api.plan(
        function_of(script, name),
        policy=auto.NAME,
        devices=options.devices,
        batch=function_of(script, DEFAULT_BATCH if has_rows else options.batch, BATCH),
        rows=int(options.batch) if has_rows else None,
        machine=options.machine,
        memory=options.memory,
        host=options.host,
    )
    if options.python:
        return 0, plan.to_python()
    assert plan.ranking is not None
    if options.json:
        return 0, _json_text({**plan.to_dict(), "ranking": plan.ranking.to_dict()})
    return 0, f"{plan.ranking}\n\n{plan}\n"


def _plan_on_mesh(options: argparse.Namespace) -> tuple[int, str]:
    unused = [option for option in ("host", "machine") if getattr(options, option)]
    if unused or options.memory not in (None, True):
        name = unused[0] if unused else f"memory {options.memory}"
        raise UsageError(f"--{name} is for --policy auto: give --devices in place of --mesh")
    file, name = parse_target(options.target)
    mesh = parse_mesh(options.mesh, options.axes)
    settings = dict(map(parse_option, options.option))
    if options.python and (options.json or options.memory):
        raise UsageError("--python prints a program: leave out --json and --memory")
    policy = options.policy or DEFAULT_POLICY
    api.install()
    if options.memory:
        scripts.simulate(mesh.size, "--memory")
    elif resolve_job(environ=os.environ) is None:
        bootstrap.simulate(mesh.size)  # for a function that makes a mesh of all devices
    script = load_script(file)
    build = function_of(script, name)
    plan = plan_api.plan(build, mesh, policy, **settings)
    if options.python:
        return 0, plan.to_python()
    memory = None
    if options.memory:
        batch: Callable[[], Any] = function_of(script, options.batch, BATCH)
        memory = plan_api.estimate_memory(plan, build, batch)
    if options.json:
        more = {} if memory is None else {"memory": memory.to_dict()}
        return 0, _json_text({**plan.to_dict(), **more})
    return 0, f"{plan}\n" if memory is None else f"{plan}\n\n{memory}\n"


def _json_text(data: dict[str, object]) -> str:
    return json.dumps(data, indent=2) + "\n"


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
    return 0, _json_text(machine.to_dict()) if options.json else f"{MachineReport(machine)}\n"


# Each returns the exit code, and what it prints.
COMMANDS: dict[str, Callable[[argparse.Namespace], tuple[int, str]]] = {
    "status": _status,
    "plan": _plan,
    "explain": _explain,
    "verify": _verify,
    "measure": _measure,
    "checkpoint": checkpoints.run,
}


def _result_text(result: Status | Explanation | Verification, options: argparse.Namespace) -> str:
    if result.rank != 0:
        return ""
    return _json_text(result.to_dict()) if options.json else f"{result}\n"
