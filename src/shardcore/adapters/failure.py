"""The failure watch: a rank that fails ends all ranks, with its own error first.

Every rank watches a `FailureStore` from a thread. A failing rank publishes its uncaught exception
there; the others print it and exit. A process of this host that is killed, also for memory, is
found by its process number. One of another host is found by its launcher or the next collective.

A rank that ends in order publishes that. Rank 0, which holds the store if there is no launcher,
exits last, or when all others know that the store will close. They stop to watch then: the next
collective shows later failures.
"""

import atexit
import contextlib
import os
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import NoReturn
from uuid import uuid4

from attrs import frozen

from shardcore.adapters import process_group
from shardcore.adapters.failure_store import Failure, FailureStore
from shardcore.reporting.errors import strip_own_frames

_POLL_SECONDS = 1.0
# The most seconds that a failing rank waits until the others have read its error.
_SHOW_SECONDS = 3.0
# The others exit a little later, so that a launcher sees the failing rank exit first.
_YIELD_SECONDS = 1.5
# The most seconds that rank 0 waits at an orderly end until the others release its store.
_LEAVE_SECONDS = 30.0


@frozen
class _Process:
    """A process, and its host, within which its number is unique."""

    host: str
    pid: int

    def is_gone(self) -> bool:
        try:
            state = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()[0]
        except (FileNotFoundError, ProcessLookupError):
            return True
        return state in "ZX"


class FailureWatch:
    """The watch of this rank. All ranks start it once, after the process group.

    Example:
        >>> FailureWatch.start() is None  # alone: no rank to watch
        True
    """

    def __init__(
        self, name: str, rank: int, world_size: int, neighbours: dict[int, _Process]
    ) -> None:
        key = f"shardcore/failure/{name}"
        self._rank = rank
        self._world_size = world_size
        self._neighbours = neighbours
        self._pid = os.getpid()
        # Both now: a connection to a closed store takes minutes to fail.
        self._store = FailureStore(process_group.store_for_thread(key), rank)
        watchers_store = FailureStore(process_group.store_for_thread(key), rank)
        self._thread = threading.Thread(
            target=self._watch, args=(watchers_store,), name="shardcore-failure-watch", daemon=True
        )
        # The thread that ends this rank acquires it, and never releases it.
        self._ending = threading.Lock()
        self._stopped = threading.Event()
        # Set once rank 0 has ended in order: its store may close, and is not used any more.
        self._released = threading.Event()
        self._previous_hook = sys.excepthook
        sys.excepthook = self._on_uncaught
        atexit.register(self.stop)
        self._thread.start()

    @classmethod
    def start(cls) -> "FailureWatch | None":
        """Starts to watch the process group. A collective: every rank of the group calls it.

        Until `stop`, which an orderly exit of the interpreter calls, an uncaught exception ends
        this process with exit code 1 (130 for a KeyboardInterrupt). It skips `atexit` functions,
        since the exit of an interpreter can wait for its peers for ever. The `finally` blocks of
        the exception have run by then. A process that exits by `os._exit` while others work must
        call `stop` before.

        Returns:
            The watch. None if there is no other rank: for a single process, or simulated peers.
        """
        rank, world_size = process_group.rank(), process_group.world_size()
        if world_size == 1 or process_group.is_simulated():
            return None
        # An earlier watch of the same job has left its keys in the store.
        names, processes = zip(
            *process_group.gather((uuid4().hex, _Process(_host(), os.getpid()))), strict=True
        )
        here = {
            each: process
            for each, process in enumerate(processes)
            if each != rank and process.host == processes[rank].host != ""
        }
        return cls(names[0], rank, world_size, here)

    def stop(self) -> None:
        """Ends this rank's part in the job in order. Does nothing the second time.

        Rank 0 waits, at most 30 seconds, until every other rank has ended or knows that rank 0
        has. A failure that is published meanwhile ends this rank like any other.
        """
        if self._stopped.is_set() or os.getpid() != self._pid:
            return
        self._ending.acquire()
        self._stopped.set()
        self._thread.join(5 * _POLL_SECONDS)
        with _store_may_be_gone():
            self._leave()
        if sys.excepthook == self._on_uncaught:
            sys.excepthook = self._previous_hook
        atexit.unregister(self.stop)
        self._ending.release()

    def _leave(self) -> None:
        if self._released.is_set():
            return
        self._store.end()
        if self._rank != 0:
            self._release(self._store)
            return
        for _ in self._until_released(_LEAVE_SECONDS):
            failure = self._look(self._store)
            if failure is not None:
                self._end_after(failure, self._store)

    def _release(self, store: FailureStore) -> None:
        # Set first: rank 0 may exit before its reply arrives.
        self._released.set()
        store.release()

    def _until_released(self, seconds: float) -> Iterator[None]:
        """Yields until all other ranks have released the store, at most for `seconds`."""
        deadline = time.monotonic() + seconds
        while self._store.count_released() < self._world_size - 1 and time.monotonic() < deadline:
            yield
            time.sleep(0.05)

    def _watch(self, store: FailureStore) -> None:
        while not self._stopped.wait(_POLL_SECONDS) and not self._released.is_set():
            failure = self._look(store)
            if failure is not None:
                self._ending.acquire()
                self._end_after(failure, store)

    def _look(self, store: FailureStore) -> Failure | None:
        """Returns the first failure of the others, if there is one."""
        # Before the store is read, which then has all that an ended process has published.
        gone = [rank for rank, process in self._neighbours.items() if process.is_gone()]
        if 0 in gone:
            # Rank 0 waits for this rank at an orderly end. Its store may be closed.
            return _silent(0)
        try:
            failure = store.first()
            if failure is None and self._rank != 0 and store.has_ended(0):
                self._release(store)
            elif failure is None:
                failure = self._first_silent(gone, store)
        except RuntimeError:
            return None if self._released.is_set() else _silent(0)
        return failure

    def _first_silent(self, gone: list[int], store: FailureStore) -> Failure | None:
        for rank in gone:
            if not store.has_ended(rank):
                return store.claim(_silent(rank))
            del self._neighbours[rank]
        return None

    def _on_uncaught(
        self, kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        if os.getpid() != self._pid:
            self._previous_hook(kind, error, trace)
            return
        self._ending.acquire()
        # No error may stop this: the other ranks and atexit would wait for this rank.
        try:
            self._tell(kind, error, trace)
        finally:
            _exit(130 if issubclass(kind, KeyboardInterrupt) else 1)

    def _tell(
        self, kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        """Publishes and shows this rank's failure, after another's if that came first."""
        strip_own_frames(error)
        trace = error.__traceback__
        headline = traceback.format_exception_only(kind, error)[-1].strip()
        report = "".join(traceback.format_exception(kind, error, trace))
        first, ended = self._publish(Failure(self._rank, headline, report))
        if first.rank != self._rank:
            _say(f"[rank {self._rank}] failed after rank {first.rank} did: {headline}\n")
            self._end_after(first, self._store)
        before = f" after rank {', '.join(map(str, ended))} had ended" if ended else ""
        _say(f"[rank {self._rank}] failed{before}:\n")
        with contextlib.suppress(OSError):  # standard error is closed
            self._previous_hook(kind, error, trace)
        with _store_may_be_gone():
            if not self._released.is_set():
                for _ in self._until_released(_SHOW_SECONDS):
                    pass

    def _publish(self, own: Failure) -> tuple[Failure, list[int]]:
        """Publishes `own`; returns the first failure and the ranks that had ended in order."""
        # A peer's death may have caused this error; its process disappears a moment later.
        time.sleep(0.1)
        with _store_may_be_gone():
            if not self._released.is_set():
                first = self._look(self._store) or self._store.claim(own)
                ended = [each for each in range(self._world_size) if self._store.has_ended(each)]
                return first, ended
        return own, []

    def _end_after(self, failure: Failure, store: FailureStore) -> NoReturn:
        """Ends this rank because of another rank's failure."""
        # The failing rank prints first.
        time.sleep(0.2)
        detail = f"\n{failure.report}" if self._rank == 0 else f" {failure.headline}"
        _say(f"[rank {self._rank}] ends, as rank {failure.rank} failed first:{detail.rstrip()}\n")
        if failure != _silent(0) and not self._released.is_set():
            with _store_may_be_gone():
                self._release(store)
        time.sleep(_YIELD_SECONDS)
        _exit(1)


def _silent(rank: int) -> Failure:
    text = "its process ended without an error (killed, out of memory, os._exit?)"
    return Failure(rank, text, text)


def _host() -> str:
    """Returns a name of the host for process numbers; empty if it is unknown."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""


def _store_may_be_gone() -> contextlib.suppress:
    # torch reports a lost store by RuntimeErrors, DistNetworkError among them.
    return contextlib.suppress(RuntimeError)


def _say(text: str) -> None:
    # One write, so that lines of several ranks do not mix.
    with contextlib.suppress(OSError):  # standard error is closed
        sys.stderr.write(text)
        sys.stderr.flush()


def _exit(code: int) -> NoReturn:
    with contextlib.suppress(Exception):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)
