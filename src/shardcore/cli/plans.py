"""The command `shardcore plan`: the layout map of a policy, or the best of all."""

import argparse
import json
import os
from collections.abc import Callable
from typing import Any

from shardcore import api, bootstrap, plan_api
from shardcore.bootstrap.cost import auto
from shardcore.cli import scripts
from shardcore.cli.arguments import (
    DEFAULT_BATCH,
    DEFAULT_POLICY,
    UsageError,
    parse_mesh,
    parse_option,
    parse_target,
)
from shardcore.cli.scripts import BATCH, function_of, load_script
from shardcore.domain.ranks.job import resolve_job


def run(options: argparse.Namespace) -> tuple[int, str]:
    """Runs the command; returns the exit code, and what it prints."""
    if (options.policy == auto.NAME) != (options.devices is not None):
        raise UsageError("--policy auto goes with --devices N, the other policies with --mesh")
    return _search(options) if options.devices is not None else _plan(options)


def _search(options: argparse.Namespace) -> tuple[int, str]:
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
        return 0, _json({**plan.to_dict(), "ranking": plan.ranking.to_dict()})
    return 0, f"{plan.ranking}\n\n{plan}\n"


def _plan(options: argparse.Namespace) -> tuple[int, str]:
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
        return 0, _json({**plan.to_dict(), **more})
    return 0, f"{plan}\n" if memory is None else f"{plan}\n\n{memory}\n"


def _json(data: dict[str, object]) -> str:
    return json.dumps(data, indent=2) + "\n"
