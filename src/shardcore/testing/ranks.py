"""Real ranks for a test: forked from this process, joined in a gloo group, ended together.

Forking keeps the modules that the parent has imported, so a case takes a second or two and not the
time of importing torch and Keras again. Needs a system with ``fork`` (Linux, macOS).
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
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from attrs import frozen

from shardcore.domain.errors import MeshError, ShardcoreError

_LAUNCH_VARIABLES = ("KERAS_DISTRIBUTION_", "TORCHELASTIC_")
# How long the parent listens for other ranks' news once one has failed.
_GRACE_SECONDS = 0.3


class RankFailed(ShardcoreError, AssertionError):  # noqa: N818 - it says what happened, as a test's report
    """A rank of :func:`run_ranks` raised, died or did not end in time.

    Attributes:
        rank: the first rank that failed.
    """

    def __init__(self, rank: int, message: str) -> None:
        super().__init__(message)
        self.rank = rank


@frozen
class _Case:
    """What every rank of one call is told."""

    fn: Callable[..., Any]
    args: tuple[Any, ...]
    environment: dict[str, str]
    folder: Path
    timeout: float
    init: bool

    def stacks(self, rank: int) -> Path:
        """Returns the file to which the rank writes where it is, when it is asked to."""
        return self.folder / f"stacks-{rank}"


@frozen
class _Failure:
    rank: int
    at: float
    report: str


@frozen
class _Rank:
    rank: int
    process: BaseProcess
    pipe: Connection


def run_ranks(
    fn: Callable[..., Any],
    world_size: int,
    *args: Any,
    timeout: float = 60,
    init: bool = True,
) -> list[Any]:
    """Runs ``fn(rank, *args)`` on ``world_size`` real ranks and returns what each returned.

    The ranks are forked from this process, so ``fn`` and ``args`` may be anything, closures
    included; import torch and Keras once before, and compute nothing with them in this process:
    thread pools do not survive a fork. A reference run on one device is ``run_ranks(fn, 1)``. In
    each rank the environment is as ``torchrun`` sets it, torch uses one thread, Keras has a fresh
    session, and what the rank registers with ``atexit`` is run when ``fn`` has returned.

    Args:
        fn: called as ``fn(rank, *args)``; its result must be picklable.
        world_size: number of ranks, at least 1.
        *args: further arguments of ``fn``.
        timeout: seconds for everything, after which all ranks are killed.
        init: whether the gloo group is there before ``fn`` is called; if False, ``fn`` may start
            one itself from the environment.

    Returns:
        The results in the order of ranks.

    Raises:
        MeshError: if there would be no rank.
        RankFailed: if a rank raised, died or did not end in time; the message begins with the
            first failing rank's traceback, or holds every rank's stack. All ranks are gone then.

    Example:
        >>> run_ranks(lambda rank, base: base + rank, 2, 10, init=False)
        [10, 11]
    """
    if world_size < 1:
        raise MeshError(f"Expected world_size of at least 1, got {world_size}.")
    environment = {
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "OMP_NUM_THREADS": "1",
    }
    with tempfile.TemporaryDirectory(prefix="shardcore-ranks-") as folder:
        case = _Case(fn, args, environment, Path(folder), timeout, init)
        with _forked(case, world_size) as ranks:
            return _collect(case, ranks)


@contextlib.contextmanager
def _forked(case: _Case, world_size: int) -> Iterator[list[_Rank]]:
    """Forks the ranks; on leaving, none of them is left, not even as a zombie."""
    context = multiprocessing.get_context("fork")
    ranks: list[_Rank] = []
    # What is buffered here would be written once more by every rank.
    _flush()
    try:
        for rank in range(world_size):
            receiver, sender = context.Pipe(duplex=False)
            process = context.Process(target=_child, args=(case, rank, sender), daemon=True)
            with warnings.catch_warnings():
                # Python 3.12 warns of forking beside threads, which is documented above.
                warnings.simplefilter("ignore", DeprecationWarning)
                process.start()
            sender.close()
            ranks.append(_Rank(rank, process, receiver))
        yield ranks
    finally:
        for each in ranks:
            each.process.kill()
        for each in ranks:
            each.process.join()
            each.process.close()
            each.pipe.close()


def free_port() -> int:
    """A TCP port of this host that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _flush() -> None:
    sys.stdout.flush()
    sys.stderr.flush()


def _child(case: _Case, rank: int, sender: Connection) -> None:
    """One rank, from fork to its end: sends ``("result", ...)`` or ``("failure", ...)``."""
    # What the parent made stays: to look through it at each collection takes a quarter of a second.
    gc.freeze()
    # What the parent registered is the parent's to run.
    atexit._clear()  # noqa: SLF001 - the only way, undocumented since Python 3.0
    dump = case.stacks(rank).open("w")
    faulthandler.register(signal.SIGUSR1, file=dump, all_threads=True)
    try:
        _become_rank(case, rank)
        message = pickle.dumps(("result", case.fn(rank, *case.args)))
        atexit._run_exitfuncs()  # noqa: SLF001 - a forked process does not run them by itself
    except BaseException:  # noqa: BLE001 - SystemExit too: whatever ends a rank is told
        report = f"rank {rank} failed:\n{traceback.format_exc()}"
        message = pickle.dumps(("failure", _Failure(rank, time.monotonic(), report)))
    _flush()
    sender.send_bytes(message)
    # Stay until killed: a rank that leaves breaks the connections of those still at work, and
    # their errors would blur what was first.
    time.sleep(case.timeout)


def _become_rank(case: _Case, rank: int) -> None:
    for name in [n for n in os.environ if n.startswith(_LAUNCH_VARIABLES)]:
        del os.environ[name]
    os.environ.update(case.environment, RANK=str(rank), LOCAL_RANK=str(rank))
    if "keras" in sys.modules:
        sys.modules["keras"].utils.clear_session()
    if not case.init and "torch" not in sys.modules:
        return
    # Here, as only this needs torch.
    from shardcore.adapters import process_group
    from shardcore.domain.job import resolve_job

    process_group.single_threaded()
    if case.init:
        process_group.start(
            resolve_job(environ=os.environ), case.timeout, init_method=f"file://{case.folder}/store"
        )


def _collect(case: _Case, ranks: list[_Rank]) -> list[Any]:
    deadline = time.monotonic() + case.timeout
    waiting = {each.pipe: each for each in ranks}
    results: dict[int, Any] = {}
    failures: list[_Failure] = []
    while waiting:
        ready = wait(list(waiting), max(0.0, deadline - time.monotonic()))
        if not ready:
            break
        for pipe in ready:
            each = waiting.pop(pipe)  # type: ignore[call-overload]
            kind, value = _receive(each)
            if kind == "result":
                results[each.rank] = value
            else:
                failures.append(value)
                deadline = min(deadline, time.monotonic() + _GRACE_SECONDS)
    if failures:
        failures.sort(key=lambda failure: failure.at)
        raise RankFailed(failures[0].rank, "\n".join(failure.report for failure in failures))
    if waiting:
        raise _timed_out(case, list(waiting.values()))
    return [results[rank] for rank in range(len(ranks))]


def _receive(each: _Rank) -> tuple[str, Any]:
    try:
        kind, value = pickle.loads(each.pipe.recv_bytes())
        return kind, value
    except EOFError:
        each.process.join()
        report = f"rank {each.rank} ended without a result, exit code {each.process.exitcode}\n"
        # Time 0: what the other ranks then raise is a consequence.
        return "failure", _Failure(each.rank, 0.0, report)


def _timed_out(case: _Case, late: list[_Rank]) -> RankFailed:
    for each in late:
        assert each.process.pid is not None
        os.kill(each.process.pid, signal.SIGUSR1)
    time.sleep(_GRACE_SECONDS)
    stacks = [f"rank {r.rank} was here:\n{case.stacks(r.rank).read_text()}" for r in late]
    names = ", ".join(str(each.rank) for each in late)
    problem = f"rank {names} did not end within {case.timeout:g} seconds"
    return RankFailed(late[0].rank, "\n".join([problem, *stacks]))
