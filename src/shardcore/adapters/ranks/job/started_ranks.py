"""Ranks that this process has started: what they print, their results, their errors, their end."""

import codecs
import contextlib
import math
import os
import pickle
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import IO, Any, Generic, Protocol, TypeVar

import attrs

from shardcore.domain.errors import RankFailed
from shardcore.reporting.errors import format_error, strip_own_frames

_Result = TypeVar("_Result")

# How long the parent waits for the reports of other ranks after one has failed.
_GRACE_SECONDS = 0.3
_CHUNK_BYTES = 1 << 16
# What to do about a result that cannot be sent.
REMEDY = "return numbers, arrays, or the paths of files that the function saved"


@attrs.frozen
class Case(Generic[_Result]):
    """The work of the ranks.

    Args:
        function: It is called as `function(rank, *arguments)`, or without the rank.
        arguments: Its further arguments.
        timeout: Seconds until all ranks are killed; None for no limit.
        init: Whether the gloo group is started before.
        keeps_session: Whether ranks keep the Keras session of this process, with its counts of
            layer names.
        passes_rank: Whether the function gets the rank.
    """

    function: Callable[..., _Result]
    arguments: tuple[object, ...]
    timeout: float | None = None
    init: bool = False
    keeps_session: bool = False
    passes_rank: bool = True

    def call(self, rank: int) -> _Result:
        """Calls the function on a rank."""
        return self.function(*(rank,) * self.passes_rank, *self.arguments)


@attrs.frozen
class Workspace:
    """The environment and the files of the ranks of one call."""

    environment: dict[str, str]
    folder: Path

    def stacks(self, rank: int) -> Path:
        """Names the file to which the rank writes its stacks: on SIGUSR1, and when it crashes."""
        return self.folder / f"stacks-{rank}"


@attrs.frozen
class ErrorReport:
    """The error of a rank, as the process that started it shows it.

    Args:
        rank: The rank.
        at: When it failed, in seconds of the clock of this host.
        text: What is shown of it.
    """

    rank: int
    at: float
    text: str

    @classmethod
    def of(cls, rank: int, error: BaseException) -> "ErrorReport":
        """Formats the error of `rank` with the frames of the user."""
        strip_own_frames(error)
        return cls(rank, time.monotonic(), f"rank {rank} failed:\n{format_error(error)}")


class RankProcess(Protocol):
    """A process as `multiprocessing` shows it."""

    @property
    def pid(self) -> int | None:
        """Its number."""

    @property
    def exitcode(self) -> int | None:
        """Its exit code, the negative number of the signal that ended it; None while it runs."""

    def kill(self) -> None:
        """Ends it at once."""

    def join(self) -> None:
        """Waits for its end."""

    def close(self) -> None:
        """Releases its resources, after its end."""


class Stream:
    """A pipe into which a rank prints, and the stream of this process that shows it."""

    def __init__(self, pipe: int, shown: Callable[[], IO[str]]) -> None:
        self._pipe = pipe
        self._shown = shown
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def fileno(self) -> int:
        """Names the pipe by its number, for `wait`."""
        return self._pipe

    def show(self) -> bool:
        """Shows what has come, and returns whether more may come."""
        printed = os.read(self._pipe, _CHUNK_BYTES)
        text = self._decoder.decode(printed, final=not printed)
        if text:
            self._shown().write(text)
            self._shown().flush()
        return bool(printed)

    def close(self) -> None:
        """Closes the pipe."""
        os.close(self._pipe)


@attrs.frozen
class Rank:
    """A rank that runs.

    Args:
        rank: Its number.
        process: Its process.
        pipe: It sends `("result", value)` or `("failure", ErrorReport)`.
        streams: What it prints, if this process shows it.
    """

    rank: int
    process: RankProcess
    pipe: Connection
    streams: Sequence[Stream] = ()


@contextlib.contextmanager
def killed_at_end(ranks: Sequence[Rank]) -> Iterator[None]:
    """Kills and joins all ranks at the end of the context: no zombie is left."""
    try:
        yield
    finally:
        for rank in ranks:
            rank.process.kill()
        for rank in ranks:
            rank.process.join()
            rank.process.close()
            rank.pipe.close()
            for stream in rank.streams:
                stream.close()


@contextlib.contextmanager
def deferred_interrupts() -> Iterator[None]:
    """Defers an interrupt that comes inside to the end of the context."""
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


def flush() -> None:
    """Writes the text that is buffered."""
    sys.stdout.flush()
    sys.stderr.flush()


def collect(timeout: float | None, workspace: Workspace, ranks: Sequence[Rank]) -> list[Any]:
    """Collects the results in the order of ranks, and meanwhile shows what ranks print.

    Raises:
        RankFailed: If a rank raised, died or did not end in time.
    """
    deadline = math.inf if timeout is None else time.monotonic() + timeout
    waiting = {rank.pipe: rank for rank in ranks}
    streams: list[Any] = [stream for rank in ranks for stream in rank.streams]
    results: dict[int, Any] = {}
    failures: list[ErrorReport] = []
    while waiting:
        left = None if deadline == math.inf else max(0.0, deadline - time.monotonic())
        ready = wait([*waiting, *streams], left)
        if not ready:
            break
        _show(streams, ready)
        for pipe in filter(waiting.__contains__, ready):
            rank = waiting.pop(pipe)  # type: ignore[call-overload]
            kind, value = _receive(rank, workspace)
            if kind == "result":
                results[rank.rank] = value
            else:
                failures.append(value)
                deadline = min(deadline, time.monotonic() + _GRACE_SECONDS)
    while ready := wait(streams, 0):  # what they printed before they ended
        _show(streams, ready)
    # A process that a killed rank has forked may hold its pipe open for a while.
    failures += [_death_of(rank, workspace) for rank in waiting.values() if _has_ended(rank)]
    if failures:
        failures.sort(key=lambda failure: failure.at)
        raise RankFailed(failures[0].rank, "\n".join(failure.text for failure in failures))
    if waiting:
        raise _timed_out(timeout, workspace, list(waiting.values()))
    return [results[rank] for rank in range(len(ranks))]


def _show(streams: list[Any], ready: Sequence[object]) -> None:
    for stream in [stream for stream in streams if stream in ready]:
        if not stream.show():
            streams.remove(stream)


def _receive(rank: Rank, workspace: Workspace) -> tuple[str, Any]:
    try:
        message = rank.pipe.recv_bytes()
    except EOFError:
        rank.process.join()
        return "failure", _death_of(rank, workspace)
    try:
        kind, value = pickle.loads(message)
    except (Exception, SystemExit) as error:  # noqa: BLE001 - whatever the value raises
        strip_own_frames(error)
        report = (
            f"rank {rank.rank} failed:\nits result cannot be unpickled in the process that "
            f"launched it: {REMEDY}.\n{format_error(error)}"
        )
        return "failure", ErrorReport(rank.rank, time.monotonic(), report)
    return kind, value


def _has_ended(rank: Rank) -> bool:
    return rank.process.exitcode is not None


def _death_of(rank: Rank, workspace: Workspace) -> ErrorReport:
    report = f"rank {rank.rank} ended without a result, exit code {rank.process.exitcode}\n"
    report += _crash_stacks(workspace.stacks(rank.rank))
    # Time 0: the errors of the other ranks follow from this one.
    return ErrorReport(rank.rank, 0.0, report)


def _crash_stacks(stacks: Path) -> str:
    """Reads the stacks of a rank that crashed in C++; without the list of its modules."""
    return stacks.read_text().partition("\nExtension modules")[0]


def _timed_out(timeout: float | None, workspace: Workspace, late: list[Rank]) -> RankFailed:
    for rank in late:
        assert rank.process.pid is not None
        os.kill(rank.process.pid, signal.SIGUSR1)
    time.sleep(_GRACE_SECONDS)
    stacks = [f"rank {r.rank} was here:\n{workspace.stacks(r.rank).read_text()}" for r in late]
    names = ", ".join(str(rank.rank) for rank in late)
    problem = f"rank {names} did not end within {timeout:g} seconds"
    return RankFailed(late[0].rank, "\n".join([problem, *stacks]))
