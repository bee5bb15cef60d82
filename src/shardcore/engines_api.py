"""The function of `shardcore` that makes the engines of a notebook ranks."""

import os
from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING

from shardcore import bootstrap

if TYPE_CHECKING:
    from shardcore.adapters.ranks.launch.engines import Engines


def join_engines(
    client: object, devices: int | None = None, strategy: str = "auto", **options: object
) -> "Engines":
    """Makes the engines of a local ipyparallel cluster the ranks of a job.

    Cells that begin with `%%px` run on all of them then, and a model stays in the ranks from one
    cell to the next. On a machine with GPUs each rank has its own.

    Args:
        client: The `ipyparallel.Client` of a cluster on this host.
        devices: The number of ranks, one device each; by default all engines.
        strategy: The strategy that the ranks install: see `install`.
        options: Its options.

    Returns:
        The engines: `.status()` says what each rank does, `.stop()` ends them and their cluster,
        and `.view` is the ipyparallel `DirectView` of them.

    Raises:
        EnvironmentProblem: If ipyparallel is not installed; if there are too few engines, or
            engines of another host, or engines that are in a job already; or if a rank could not
            join. The cluster has ended in the last case.

    Example:
        >>> import ipyparallel  # doctest: +SKIP
        >>> client = ipyparallel.Cluster(n=2).start_and_connect_sync()  # doctest: +SKIP
        >>> shardcore.join_engines(client).numbers  # doctest: +SKIP
        (0, 1)
    """
    from shardcore.adapters.ranks.launch import engines

    return engines.join(client, devices, partial(_become_rank, strategy, options, os.getpid()))


def _become_rank(
    strategy: str, options: dict[str, object], notebook: int, environment: Mapping[str, str]
) -> str:
    """Makes this engine a rank, which ends with the process `notebook`; returns its device."""
    from shardcore.adapters.ranks.launch import engines

    os.environ.update(environment)
    installation = bootstrap.install(strategy, options)
    installation.processes.initialize()
    engines.follow_cells(installation.processes)
    engines.end_with(notebook)
    status = bootstrap.status()
    return status.devices[status.rank]
