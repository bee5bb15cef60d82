"""Real ranks on this machine: processes forked from this one.

A forked process has the modules and functions of its parent, also those of a notebook's cells: it
does not import torch and Keras again. It needs a system with `fork` (Linux, macOS).
"""

import atexit
import contextlib
import faulthandler
import gc
import math
import multiprocessing
import os
import pickle
import signal
import socket
import sys
import tempfile
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, Generic, NoReturn, TypeVar

import attrs

from shardcore.domain.errors import EnvironmentProblem, MeshError, RankFailed
from shardcore.domain.job import resolve_job

_Result = TypeVar("_Result")

_LAUNCH_VARIABLES = ("KERAS_DISTRIBUTION_", "TORCHELASTIC_")
# How long the parent waits for the reports of other ranks after one has failed.
_GRACE_SECONDS = 0.3


@attrs.frozen
class Case(Generic[_Result]):
    """The work of the ranks.

    Args:
        function: It is called as `function(rank, *arguments)`.
        arguments: Its further arguments.
        timeout: Seconds until all ranks are killed; None for no limit.
        init: Whether the gloo group is started before.
        keeps_session: Whether ranks keep the Keras session of this process, with its counts of
            layer names.
    """

    function: Callable[..., _Result]
    arguments: tuple[object, ...]
    timeout: float | None
    init: bool
    keeps_session: bool = False


@attrs.frozen
class _Place:
    """The environment and the files of the ranks of one call."""

    environment: dict[str, str]
    folder: Path

    def stacks(self, rank: int) -> Path:
        """Returns the file to which the rank writes its stacks: on SIGUSR1, and when it crashes."""
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


def run(case: Case[_Result], world_size: int) -> list[_Result]:
    """Runs `case` on `world_size` ranks, and returns their results in the order of ranks.

    Raises:
        MeshError: If `world_size` is below 1.
        RankFailed: If a rank raised, died or did not end in time. No rank is left.
    """
    if world_size < 1:
        raise MeshError(f"Expected at least 1 rank, got {world_size}.")
    environment = {
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "OMP_NUM_THREADS": "1",
    }
    with tempfile.TemporaryDirectory(prefix="shardcore-ranks-") as folder:
        place = _Place(environment, Path(folder))
        with _forked(case, place, world_size) as ranks:
            return _collect(case, place, ranks)


@contextlib.contextmanager
def _forked(case: Case[Any], place: _Place, world_size: int) -> Iterator[list[_Rank]]:
    """Forks the ranks; kills and joins all of them at the end, so that no zombie is left."""
    context = multiprocessing.get_context("fork")
    ranks: list[_Rank] = []
    # Every rank would write the buffered text again.
    _flush()
    try:
        with _interrupted_later():  # else a rank could be forked and not known
            for rank in range(world_size):
                place.stacks(rank).touch()
                receiver, sender = context.Pipe(duplex=False)
                arguments = (case, place, rank, sender)
                # No daemon: a rank may fork processes too.
                process = context.Process(target=_child, args=arguments)
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


@contextlib.contextmanager
def _interrupted_later() -> Iterator[None]:
    """Opens a context at whose end an interrupt that came meanwhile is raised."""
    if threading.current_thread() is not threading.main_thread():
        yield  # which gets no interrupts
        return
    came: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, _frame: came.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
        if came:
            signal.raise_signal(signal.SIGINT)


def check_parent() -> None:
    """Refuses to fork ranks from a rank, or from a process that has used CUDA."""
    job = resolve_job(environ=os.environ)
    if job is not None:
        raise EnvironmentProblem(
            f"launch() starts ranks, and this process is rank {job.rank} of {job.world_size} "
            "already: call the function itself."
        )
    check_device("launch()")


def check_device(what: str) -> None:
    """Refuses the call `what`, which forks this process, if it has used CUDA."""
    if "torch" in sys.modules and sys.modules["torch"].cuda.is_initialized():
        raise EnvironmentProblem(
            f"{what} forks this process, which has used CUDA, and CUDA does not survive a fork: "
            "start a new process (restart the notebook's kernel), and use CUDA in the function "
            "only."
        )


def free_port() -> int:
    """Returns a TCP port of this host that is free now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _flush() -> None:
    sys.stdout.flush()
    sys.stderr.flush()


def _child(case: Case[object], place: _Place, rank: int, sender: Connection) -> None:
    """Runs one rank, which sends `("result", ...)` or `("failure", ...)`."""
    threading.Thread(target=_end_with_parent, name="shardcore-parent", daemon=True).start()
    # An interrupt goes to the parent too, which kills the ranks.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # Each garbage collection would spend a quarter of a second on the objects of the parent.
    gc.freeze()
    # Only the parent runs the functions that it registered.
    atexit._clear()  # noqa: SLF001 - the only way, undocumented since Python 3.0
    dump = place.stacks(rank).open("w")
    faulthandler.register(signal.SIGUSR1, file=dump, all_threads=True)
    faulthandler.enable(file=dump)
    try:
        _become_rank(case, place, rank)
        message = pickle.dumps(("result", case.function(rank, *case.arguments)))
        atexit._run_exitfuncs()  # noqa: SLF001 - a forked process does not run them by itself
    except BaseException:  # noqa: BLE001 - SystemExit too: the parent reports it
        report = f"rank {rank} failed:\n{traceback.format_exc()}"
        message = pickle.dumps(("failure", _Failure(rank, time.monotonic(), report)))
    _flush()
    sender.send_bytes(message)
    # Wait to be killed: a rank that ends breaks the connections of the others, whose errors would
    # hide the first one.
    _end_with_parent()


def _end_with_parent() -> NoReturn:
    """Ends this process when its parent has ended, also by a signal that it could not handle."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _become_rank(case: Case[object], place: _Place, rank: int) -> None:
    for name in [n for n in os.environ if n.startswith(_LAUNCH_VARIABLES)]:
        del os.environ[name]
    os.environ.update(place.environment, RANK=str(rank), LOCAL_RANK=str(rank))
    if "keras" in sys.modules and not case.keeps_session:
        sys.modules["keras"].utils.clear_session()
    if not case.init and "torch" not in sys.modules:
        return
    # Here, as only this needs torch.
    from shardcore.adapters.job import exchange, process_group

    process_group.single_threaded()
    if case.init:
        process_group.start(
            resolve_job(environ=os.environ),
            case.timeout,
            init_method=f"file://{place.folder}/store",
        )
        exchange.share_secret()


def _collect(case: Case[_Result], place: _Place, ranks: list[_Rank]) -> list[_Result]:
    deadline = math.inf if case.timeout is None else time.monotonic() + case.timeout
    waiting = {each.pipe: each for each in ranks}
    results: dict[int, _Result] = {}
    failures: list[_Failure] = []
    while waiting:
        left = None if deadline == math.inf else max(0.0, deadline - time.monotonic())
        ready = wait(list(waiting), left)
        if not ready:
            break
        for pipe in ready:
            each = waiting.pop(pipe)  # type: ignore[call-overload]
            kind, value = _receive(each, place)
            if kind == "result":
                results[each.rank] = value
            else:
                failures.append(value)
                deadline = min(deadline, time.monotonic() + _GRACE_SECONDS)
    if failures:
        failures.sort(key=lambda failure: failure.at)
        raise RankFailed(failures[0].rank, "\n".join(failure.report for failure in failures))
    if waiting:
        raise _timed_out(case, place, list(waiting.values()))
    return [results[rank] for rank in range(len(ranks))]


def _receive(each: _Rank, place: _Place) -> tuple[str, Any]:
    try:
        kind, value = pickle.loads(each.pipe.recv_bytes())
        return kind, value
    except EOFError:
        each.process.join()
        report = f"rank {each.rank} ended without a result, exit code {each.process.exitcode}\n"
        report += _crashed_at(place.stacks(each.rank))
        # Time 0: the errors of the other ranks follow from this one.
        return "failure", _Failure(each.rank, 0.0, report)


def _crashed_at(stacks: Path) -> str:
    """Returns the stacks of a rank that crashed in C++; without the list of its modules."""
    return stacks.read_text().partition("\nExtension modules")[0]


def _timed_out(case: Case[Any], place: _Place, late: list[_Rank]) -> RankFailed:
    for each in late:
        assert each.process.pid is not None
        os.kill(each.process.pid, signal.SIGUSR1)
    time.sleep(_GRACE_SECONDS)
    stacks = [f"rank {r.rank} was here:\n{place.stacks(r.rank).read_text()}" for r in late]
    names = ", ".join(str(each.rank) for each in late)
    problem = f"rank {names} did not end within {case.timeout:g} seconds"
    return RankFailed(late[0].rank, "\n".join([problem, *stacks]))
