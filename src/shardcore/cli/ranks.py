"""Simulated ranks, for commands that run without a launcher."""

import argparse
import os

from shardcore import bootstrap
from shardcore.cli.arguments import UsageError
from shardcore.domain.job import resolve_job
from shardcore.domain.mesh import Mesh


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
