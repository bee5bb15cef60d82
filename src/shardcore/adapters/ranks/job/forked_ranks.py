"""Real ranks on this machine: processes forked from this one (ADR 40).

A forked process has the modules and functions of its parent, also those of a notebook's cells: it
does not import torch and Keras again. It needs a system with `fork` (Linux, macOS).
"""

import atexit
import contextlib
import faulthandler
import gc
import multiprocessing
import os
import pickle
import signal
import socket
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from shardcore.adapters.ranks.job import started_ranks
from shardcore.adapters.ranks.job.started_ranks import REMEDY, Case, ErrorReport, Rank, Workspace
from shardcore.domain.errors import ArgumentProblem, MeshError, describe_error, text_of
from shardcore.domain.ranks.job import rank_variables, resolve_job
from shardcore.reporting.errors import say, show_error, strip_own_frames

_Result = TypeVar("_Result")

LAUNCH_VARIABLES = ("KERAS_DISTRIBUTION_", "TORCHELASTIC_")


def run(case: Case[_Result], world_size: int) -> list[_Result]:
    """Runs `case` on `world_size` ranks, and returns their results in the order of ranks.

    Raises:
        MeshError: If `world_size` is below 1.
        RankFailed: If a rank raised, died or did not end in time. No rank is left.
    """
    with workspace_for(world_size) as workspace:
        workspace.environment["OMP_NUM_THREADS"] = "1"
        with _fork_ranks(case, workspace, world_size) as ranks:
            return started_ranks.collect(case.timeout, workspace, ranks)


@contextlib.contextmanager
def workspace_for(world_size: int) -> Iterator[Workspace]:
    """Opens the environment and the folder of `world_size` ranks, with a file for their stacks."""
    environment = environment_of(world_size)
    with tempfile.TemporaryDirectory(prefix="shardcore-ranks-") as folder:
        workspace = Workspace(environment, Path(folder))
        for rank in range(world_size):
            workspace.stacks(rank).touch()
        yield workspace


def environment_of(world_size: int) -> dict[str, str]:
    """Builds the launch variables that `world_size` ranks of this host share.

    Raises:
        MeshError: If `world_size` is below 1.
    """
    if world_size < 1:
        raise MeshError(f"Expected at least 1 rank, got {world_size}.", got=str(world_size))
    return {
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
    }


@contextlib.contextmanager
def _fork_ranks(case: Case[Any], workspace: Workspace, world_size: int) -> Iterator[list[Rank]]:
    context = multiprocessing.get_context("fork")
    ranks: list[Rank] = []
    # Every rank would write the buffered text again.
    started_ranks.flush()
    with started_ranks.killed_at_end(ranks):
        with started_ranks.deferred_interrupts():  # else a rank could be forked and not known
            for rank in range(world_size):
                receiver, sender = context.Pipe(duplex=False)
                arguments = (case, workspace, rank, sender)
                # No daemon: a rank may fork processes too.
                process = context.Process(target=_child, args=arguments)
                with warnings.catch_warnings():
                    # Python 3.12 warns of forking beside threads, which is documented above.
                    warnings.simplefilter("ignore", DeprecationWarning)
                    process.start()
                sender.close()
                ranks.append(Rank(rank, process, receiver))
        yield ranks


def free_port() -> int:
    """Finds a TCP port of this host that is free now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _child(case: Case[object], workspace: Workspace, rank: int, sender: Connection) -> None:
    threading.Thread(target=_end_with_parent, name="shardcore-parent", daemon=True).start()
    # An interrupt goes to the parent too, which kills the ranks.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # Each garbage collection would spend a quarter of a second on the objects of the parent.
    gc.freeze()
    # Only the parent runs the functions that it registered.
    atexit._clear()  # noqa: SLF001 - the only way, undocumented since Python 3.0
    write_stacks(workspace.stacks(rank))

    def work() -> object:
        _become_rank(case, workspace, rank)
        return case.call(rank)

    message = report_of(rank, work, pickle.dumps)
    started_ranks.flush()
    sender.send_bytes(message)
    # Wait to be killed: a rank that ends breaks the connections of the others, whose errors would
    # hide the first one.
    _end_with_parent()


def write_stacks(path: Path) -> None:
    """Makes this process write its stacks to a file: on SIGUSR1, and when it crashes."""
    dump = path.open("w")
    faulthandler.register(signal.SIGUSR1, file=dump, all_threads=True)
    faulthandler.enable(file=dump)


def _end_with_parent() -> NoReturn:
    """Ends this process when its parent has ended, also by a signal that it could not handle."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _become_rank(case: Case[object], workspace: Workspace, rank: int) -> None:
    for name in [n for n in os.environ if n.startswith(LAUNCH_VARIABLES)]:
        del os.environ[name]
    os.environ.update(rank_variables(workspace.environment, rank))
    if "keras" in sys.modules and not case.keeps_session:
        sys.modules["keras"].utils.clear_session()
    if "torch" in sys.modules:
        # Here, as only this needs torch.
        from shardcore.adapters.ranks.job import process_group

        process_group.single_threaded()
    join_group(case, workspace)


def join_group(case: Case[object], workspace: Workspace) -> None:
    """Starts the gloo group of the ranks, if the case has one."""
    if not case.init:
        return
    from shardcore.adapters.ranks.job import exchange, process_group

    init_method = f"file://{workspace.folder}/store"
    process_group.start(resolve_job(environ=os.environ), case.timeout, init_method=init_method)
    exchange.share_secret()


def report_of(rank: int, work: Callable[[], object], dump: Callable[[object], bytes]) -> bytes:
    """Does the work of a rank, runs its exit functions, and returns its report.

    In a process that the work has forked it does not return.

    Args:
        rank: The rank.
        work: It returns the result.
        dump: Pickles.
    """
    own = os.getpid()
    try:
        value = work()
        if os.getpid() != own:
            _end_fork(None)
        try:
            report = dump(("result", value))
        except Exception as error:  # noqa: BLE001 - whatever the value raises
            return _refuse(rank, value, error)
        atexit._run_exitfuncs()  # noqa: SLF001 - a rank does not run them by itself
    except BaseException as error:  # noqa: BLE001 - SystemExit too: the parent reports it
        if os.getpid() != own:
            _end_fork(error)
        report = pickle.dumps(("failure", ErrorReport.of(rank, error)))
    return report


def _refuse(rank: int, value: object, error: Exception) -> bytes:
    problem = ArgumentProblem(
        name=f"the result of rank {rank}",
        expected="a value that can be pickled",
        got=f"one of type {type(value).__name__!r} ({describe_error(error)})",
        remedy=REMEDY,
    )
    failure = ErrorReport(rank, time.monotonic(), f"rank {rank} failed:\n{problem}\n")
    return pickle.dumps(("failure", failure))


def _end_fork(error: BaseException | None) -> NoReturn:
    """Ends a process that is no rank, as Python ends a program: the rank may ask for its code.

    Its exit functions are those of the rank, which runs them.
    """
    code = 0
    if isinstance(error, SystemExit):
        if isinstance(error.code, int):
            code = error.code & 0xFF  # as a process has it
        elif error.code is not None:
            say(f"{text_of(error.code)}\n")
            code = 1
    elif error is not None:
        strip_own_frames(error)
        show_error(sys.excepthook, error)
        code = 1
    with contextlib.suppress(Exception):
        started_ranks.flush()
    os._exit(code)
