"""Engines of an ipyparallel cluster of this host, as the ranks of a job (ADR 57).

ipyparallel starts the engines, sends them cells, and ends them. An engine is a process with a
kernel of IPython: what a cell makes stays in it until the next one.
"""

import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import attrs

from shardcore.adapters.ranks.job.forked_ranks import environment_of
from shardcore.domain.errors import EnvironmentProblem
from shardcore.domain.ranks.job import rank_variables, resolve_job
from shardcore.reporting.status import EngineRank, EnginesStatus

if TYPE_CHECKING:  # the notebook's process needs no torch for it
    from shardcore.adapters.ranks.processes import TorchProcesses

_LOOK_SECONDS = 0.05
# The same for the end of the notebook.
_LOOK_AT_NOTEBOOK_SECONDS = 1.0
# In these an engine that runs no cell tells its facts.
_ANSWER_SECONDS = 30.0
_START = "cluster = ipyparallel.Cluster(n=2); client = cluster.start_and_connect_sync()"


@attrs.frozen
class EngineFacts:
    """Facts that an engine tells before it is a rank.

    Args:
        process: The number of its process.
        host: The name of its host.
        size: The ranks of the job in which it is; 0 if it is in none.
    """

    process: int
    host: str
    size: int

    @classmethod
    def here(cls) -> "EngineFacts":
        """Looks up process, host and job here: it is called on an engine."""
        job = resolve_job(environ=os.environ)
        return cls(os.getpid(), socket.gethostname(), 0 if job is None else job.world_size)


@attrs.frozen(eq=False)
class Engines:
    """Engines that are the ranks of a job. `shardcore.join_engines` makes it.

    Attributes:
        numbers: The number of the engine of each rank.
    """

    _client: Any
    numbers: tuple[int, ...]
    _processes: tuple[int, ...]
    _devices: tuple[str, ...]

    @property
    def view(self) -> Any:
        """The ipyparallel `DirectView` of the engines, in the order of ranks."""
        return self._client[list(self.numbers)]

    def status(self) -> EnginesStatus:
        """Lists the device, the process and the state of each rank; it waits for no cell."""
        alive = [number for number in self._client.ids if number in self.numbers]
        queues = self._client.queue_status(alive) if alive else {}
        states = [_state(queues.get(number)) for number in self.numbers]
        rows = zip(self.numbers, self._processes, self._devices, states, strict=True)
        return EnginesStatus(tuple(EngineRank(rank, *row) for rank, row in enumerate(rows)))

    def stop(self) -> None:
        """Ends the ranks in order, with their cluster. A new cluster can be started after it."""
        _stop(self._client)


def join(client: Any, devices: int | None, become_rank: Callable[..., str]) -> Engines:
    """Makes engines the ranks of a new job, in the order of their numbers.

    Args:
        client: The `ipyparallel.Client` of a cluster of this host.
        devices: The number of ranks; None for all engines.
        become_rank: It is called on each engine with the variables of its rank. It joins the job,
            and returns the device.
    """
    numbers = _choose_engines(client, devices)
    facts = [_facts_of(client, number) for number in numbers]
    _refuse_strangers(numbers, facts)
    shared = environment_of(len(numbers))
    joining = [
        client[number].apply_async(become_rank, rank_variables(shared, rank))
        for rank, number in enumerate(numbers)
    ]
    try:
        device_names = _results(joining)
    except BaseException:
        _stop(client)  # the other engines wait for the one that failed
        raise
    engines = Engines(client, numbers, tuple(fact.process for fact in facts), tuple(device_names))
    view = engines.view
    view.block = True
    if _is_in_notebook():
        view.activate()  # %px and %%px run on these engines
    return engines


def _choose_engines(client: Any, devices: int | None) -> tuple[int, ...]:
    try:
        import ipyparallel
    except ImportError as error:
        raise EnvironmentProblem(
            "join_engines() makes engines of ipyparallel the ranks of a job, and ipyparallel is "
            "not installed: pip install 'shardcore[notebook]'."
        ) from error
    if not isinstance(client, ipyparallel.Client):
        raise EnvironmentProblem(
            f"join_engines() takes the ipyparallel.Client of a cluster, got {client!r}: {_START}.",
            got=repr(client),
        )
    numbers = tuple(client.ids)
    if not numbers or (devices is not None and not 1 <= devices <= len(numbers)):
        wanted = "at least 1 engine" if devices is None else f"{devices!r} engines"
        raise EnvironmentProblem(
            f"join_engines() was asked for {wanted}, and the cluster has {len(numbers)}: start as "
            f"many as you have devices. {_START}."
        )
    return numbers[:devices]


def _facts_of(client: Any, number: int) -> EngineFacts:
    """Asks an engine for its facts; it runs one cell after the other.

    Raises:
        EnvironmentProblem: If it does not answer in time.
    """
    answer = client[number].apply_async(EngineFacts.here)
    answer.wait(_ANSWER_SECONDS)
    if not answer.ready():
        raise EnvironmentProblem(
            f"Engine {number} has not answered join_engines() for {_ANSWER_SECONDS:g} s: wait for "
            "the cell that it runs, or start a new cluster."
        )
    facts: EngineFacts = _result(answer, f"engine {number}")
    return facts


def _refuse_strangers(numbers: Sequence[int], facts: Sequence[EngineFacts]) -> None:
    here = socket.gethostname()
    for number, engine in zip(numbers, facts, strict=True):
        if engine.host != here:
            raise EnvironmentProblem(
                f"join_engines() takes engines of this host, {here!r}, and engine {number} is on "
                f"{engine.host!r}: start ranks of several hosts with torchrun.",
                name="join_engines(client)",
                got=engine.host,
            )
        if engine.size:
            raise EnvironmentProblem(
                f"Engine {number} is a rank of a job of {engine.size} already, and a process "
                "cannot join a second one: stop its cluster (engines.stop()), and start a new one."
            )


def _results(joining: Sequence[Any]) -> list[str]:
    """Waits for all engines, or raises the first error, for which others may wait."""
    while not all(result.ready() for result in joining):
        for rank, result in enumerate(joining):
            if result.ready():
                _result(result, f"rank {rank}")
        time.sleep(_LOOK_SECONDS)
    return [_result(result, f"rank {rank}") for rank, result in enumerate(joining)]


def _result(result: Any, who: str) -> Any:
    from ipyparallel.error import RemoteError

    try:
        return result.get()
    except RemoteError as error:
        raise EnvironmentProblem(
            f"{who} could not join the job: {error.ename}: {error.evalue}"
        ) from error


def _stop(client: Any) -> None:
    if client.cluster is not None:
        client.cluster.stop_cluster_sync()
    else:
        client.shutdown(hub=True, block=True)
    client.close()


def _state(queue: Mapping[str, int] | None) -> str:
    if queue is None:
        return "has ended"
    return "runs a cell" if queue["queue"] + queue["tasks"] else "waits for a cell"


def _is_in_notebook() -> bool:
    from IPython import get_ipython

    return get_ipython() is not None


def follow_cells(processes: "TorchProcesses") -> None:
    """Publishes to the other ranks the error with which a cell, or a function, has ended here."""
    from IPython import get_ipython

    def report(result: Any) -> None:
        processes.report_cell_error(result.error_in_exec or result.error_before_exec)

    def apply(*request: Any) -> Any:
        processes.report_cell_error(None)
        reply, buffers = apply_of_kernel(*request)
        if reply["status"] == "error":
            processes.report_cell_error(sys.last_value)  # the kernel has shown it, and keeps it
        return reply, buffers

    shell = get_ipython()
    shell.events.register("pre_execute", lambda: processes.report_cell_error(None))
    shell.events.register("post_run_cell", report)
    # ipyparallel 9: a function of `view.apply` is no cell, and IPython has no event for it.
    apply_of_kernel = shell.kernel.do_apply
    shell.kernel.do_apply = apply


def end_with(notebook: int) -> None:
    """Ends this process when that of the notebook has ended, as its kernel may be killed."""
    threading.Thread(
        target=_end_with, args=(notebook,), name="shardcore-notebook", daemon=True
    ).start()


def _end_with(notebook: int) -> None:
    while _is_alive(notebook):
        time.sleep(_LOOK_AT_NOTEBOOK_SECONDS)
    os.kill(os.getpid(), signal.SIGTERM)


def _is_alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    return True
