"""Real ranks for a test: processes forked from this one, in a gloo group.

A forked process has the modules that its parent imported, so a call takes a second or two: it does
not import torch and Keras again. It needs a system with `fork` (Linux, macOS).
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
from typing import Any, Generic, TypeVar

import attrs

from shardcore.domain.errors import MeshError, ShardcoreError

_Result = TypeVar("_Result")

_LAUNCH_VARIABLES = ("KERAS_DISTRIBUTION_", "TORCHELASTIC_")
# How long the parent waits for the reports of other ranks after one has failed.
_GRACE_SECONDS = 0.3


class RankFailed(ShardcoreError, AssertionError):  # noqa: N818 - it says what happened, as a test's report
    """A rank of `run_ranks` raised, died or did not end in time.

    Attributes:
        rank: The first rank that failed.
    """

    def __init__(self, rank: int, message: str) -> None:
        super().__init__(message)
        self.rank = rank


@attrs.frozen
class _Case(Generic[_Result]):
    """The arguments of one call, for every rank."""

    fn: Callable[..., _Result]
    args: tuple[object, ...]
    environment: dict[str, str]
    folder: Path
    timeout: float
    init: bool

    def stacks(self, rank: int) -> Path:
        """Returns the file to which the rank writes its stacks when it gets SIGUSR1."""
        return self.folder / f"stacks-{rank}"


@attrs.frozen
class _Failure:
    rank: int
    at: float
    report: str


@attrs.frozen
class _Rank:
    rank: int
    process: BaseProcess
    pipe: Connection


def run_ranks(
    fn: Callable[..., _Result],
    world_size: int,
    *args: object,
    timeout: float = 60,
    init: bool = True,
) -> list[_Result]:
    """Runs `fn(rank, *args)` on `world_size` real ranks and returns their results.

    The ranks are forked from this process, so `fn` and `args` may be anything, closures
    included. Import torch and Keras first, and compute nothing with them in this process:
    thread pools do not survive a fork. `run_ranks(fn, 1)` is a reference run on one device. In
    each rank the environment is as `torchrun` sets it, torch uses one thread, Keras has a fresh
    session, and the rank runs its `atexit` functions after `fn`.

    Args:
        fn: Called as `fn(rank, *args)`; its result must be picklable.
        world_size: The number of ranks, at least 1.
        *args: Further arguments of `fn`.
        timeout: Seconds for the whole call, after which all ranks are killed.
        init: Whether to start the gloo group before `fn` is called; if False, `fn` may start
            one itself from the environment.

    Returns:
        The results in the order of ranks.

    Raises:
        MeshError: If `world_size` is below 1.
        RankFailed: If a rank raised, died or did not end in time. The message begins with the
            first failing rank's traceback, or has the stack of every late rank. No rank is left.

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
def _forked(case: _Case[Any], world_size: int) -> Iterator[list[_Rank]]:
    """Forks the ranks; kills and joins all of them at the end, so that no zombie is left."""
    context = multiprocessing.get_context("fork")
    ranks: list[_Rank] = []
    # Every rank would write the buffered text again.
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
    """Returns a TCP port of this host that is free now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _flush() -> None:
    sys.stdout.flush()
    sys.stderr.flush()


def _child(case: _Case[Any], rank: int, sender: Connection) -> None:
    """Runs one rank, which sends `("result", ...)` or `("failure", ...)`."""
    # Each garbage collection would spend a quarter of a second on the objects of the parent.
    gc.freeze()
    # Only the parent runs the functions that it registered.
    atexit._clear()  # noqa: SLF001 - the only way, undocumented since Python 3.0
    dump = case.stacks(rank).open("w")
    faulthandler.register(signal.SIGUSR1, file=dump, all_threads=True)
    try:
        _become_rank(case, rank)
        message = pickle.dumps(("result", case.fn(rank, *case.args)))
        atexit._run_exitfuncs()  # noqa: SLF001 - a forked process does not run them by itself
    except BaseException:  # noqa: BLE001 - SystemExit too: the parent reports it
        report = f"rank {rank} failed:\n{traceback.format_exc()}"
        message = pickle.dumps(("failure", _Failure(rank, time.monotonic(), report)))
    _flush()
    sender.send_bytes(message)
    # Wait to be killed: a rank that ends breaks the connections of the others, whose errors would
    # hide the first one.
    time.sleep(case.timeout)


def _become_rank(case: _Case[Any], rank: int) -> None:
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


def _collect(case: _Case[_Result], ranks: list[_Rank]) -> list[_Result]:
    deadline = time.monotonic() + case.timeout
    waiting = {each.pipe: each for each in ranks}
    results: dict[int, _Result] = {}
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
        # Time 0: the errors of the other ranks follow from this one.
        return "failure", _Failure(each.rank, 0.0, report)


def _timed_out(case: _Case[Any], late: list[_Rank]) -> RankFailed:
    for each in late:
        assert each.process.pid is not None
        os.kill(each.process.pid, signal.SIGUSR1)
    time.sleep(_GRACE_SECONDS)
    stacks = [f"rank {r.rank} was here:\n{case.stacks(r.rank).read_text()}" for r in late]
    names = ", ".join(str(each.rank) for each in late)
    problem = f"rank {names} did not end within {case.timeout:g} seconds"
    return RankFailed(late[0].rank, "\n".join([problem, *stacks]))
