"""Simulated ranks, for commands that run without a launcher."""

import os

from shardcore import bootstrap
from shardcore.cli.arguments import UsageError
from shardcore.domain.job import resolve_job


def simulate(ranks: int, option: str) -> None:
    """Simulates so many ranks, as `option` asks.

    Raises:
        UsageError: If a launcher started this process.
    """
    if resolve_job(environ=os.environ) is not None:
        raise UsageError(f"{option} simulates ranks, but a launcher started this one: leave it out")
    bootstrap.simulate(ranks)
