"""The failure watch: a rank that fails ends all ranks, with its own error first.

Every rank watches a `FailureStore` from a thread. A failing rank publishes its uncaught exception
there; the others print it and exit. A process of this host that is killed, also for memory, is
found by its process number. One of another host is found by its launcher or the next collective.
The main thread of a rank that is to end gets an `OtherRankFailed`, and some seconds for its
`finally` blocks.

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
from itertools import count
from types import TracebackType
from typing import NoReturn

from shardcore.adapters.failure import heartbeats, late_report
from shardcore.adapters.failure.interrupt import Interrupt
from shardcore.adapters.failure.neighbours import Neighbours
from shardcore.adapters.failure.place import Place
from shardcore.adapters.failure.store import Failure, FailureStore, lost, no_answer, silent
from shardcore.adapters.job import exchange, process_group
from shardcore.adapters.job.signed_store import SignedStore
from shardcore.reporting.errors import say, strip_own_frames

_POLL_SECONDS = 1.0
# The most seconds that a failing rank waits until the others have read its error.
_SHOW_SECONDS = 3.0
# The others exit a little later, so that a launcher sees the failing rank exit first.
_YIELD_SECONDS = 1.5
# The seconds that the main thread has to end, with its `finally` blocks.
_FINALLY_SECONDS = 5.0
# The seconds that a store may take to answer a rank that fails.
_STORE_SECONDS = 5.0
# The seconds that a store has beyond the timeout: a collective fails before, and says more.
_NO_ANSWER_SECONDS = 10.0
# The most seconds that rank 0 waits at an orderly end until the others release its store.
_LEAVE_SECONDS = 30.0


class FailureWatch:
    """The watch of this rank. All ranks start it once, after the process group.

    Example:
        >>> FailureWatch.start() is None  # alone: no rank to watch
        True
    """

    def __init__(self, name: str, rank: int, world_size: int, neighbours: Neighbours) -> None:
        key = f"shardcore/failure/{name}"
        self._rank = rank
        self._world_size = world_size
        self._neighbours = neighbours
        self._pid = os.getpid()
        # Both now: a connection to a closed store takes minutes to fail.
        self._store = FailureStore(exchange.store_for_thread(key), rank)
        stores = FailureStore(exchange.store_for_thread(key), rank), exchange.store_for_thread()
        self._thread = threading.Thread(
            target=self._watch, args=stores, name="shardcore-failure-watch", daemon=True
        )
        self._failure: Failure | None = None  # of another rank, which ends this one
        # The thread that ends this rank acquires it, and never releases it.
        self._ending = threading.Lock()
        self._stopped = threading.Event()
        # Set once rank 0 has ended in order: its store may close, and is not used any more.
        self._released = threading.Event()
        self._interrupt = Interrupt(self._ending.locked)
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
        if not process_group.has_others():
            return None
        exchange.share_secret()
        exchange.tell_place(exchange.store(), "")
        heartbeats.send(exchange.store(), 0, Place().look())
        neighbours, name = Neighbours.meet(rank)
        # An earlier watch of the same job has left its keys in the store, under another name.
        return cls(name, rank, world_size, neighbours)

    def stop(self) -> None:
        """Ends this rank's part in the job in order. Does nothing the second time.

        Rank 0 waits, at most 30 seconds, until every other rank has ended or knows that rank 0
        has. A failure that is published meanwhile ends this rank like any other.
        """
        if self._stopped.is_set() or os.getpid() != self._pid:
            return
        self._ending.acquire()
        self._stopped.set()
        self._thread.join(5 * _POLL_SECONDS + _LEAVE_SECONDS)  # a lost store never answers it
        if self._failure is not None:
            self._end_after(self._failure)
        self._interrupt.close()
        if sys.excepthook == self._on_uncaught:
            sys.excepthook = self._previous_hook
        atexit.unregister(self.stop)
        self._ending.release()

    def _leave(self, store: FailureStore, store_for_place: SignedStore) -> None:
        exchange.tell_place(store_for_place, exchange.ENDED)
        store.end()
        if self._rank != 0:
            self._release(store)
            return
        looks = (self._look(store) for _ in self._until_released(store, _LEAVE_SECONDS))
        self._failure = next((each for each in looks if each is not None), None)

    def _release(self, store: FailureStore) -> None:
        # Set first: rank 0 may exit before its reply arrives.
        self._released.set()
        store.release()

    def _until_released(self, store: FailureStore, seconds: float) -> Iterator[None]:
        """Yields until all other ranks have released the store, at most for `seconds`."""
        deadline = time.monotonic() + seconds
        while store.count_released() < self._world_size - 1 and time.monotonic() < deadline:
            yield
            time.sleep(0.05)

    def _watch(self, store: FailureStore, store_for_place: SignedStore) -> None:
        main, published, reported = Place(), "", False
        for number in count(1):
            is_stopped = self._stopped.wait(_POLL_SECONDS)
            if self._released.is_set():
                return
            if is_stopped:
                with _store_may_be_gone():
                    self._leave(store, store_for_place)
                return
            failure = self._look_in_time(store)
            if failure is not None:
                self._interrupt_main(failure, store)
                return
            here = main.look()
            with _store_may_be_gone():
                heartbeats.send(store_for_place, number, here)
                if str(here) != published:
                    exchange.tell_place(store_for_place, published := str(here))
                is_late = here.waits and here.seconds >= exchange.REPORT_SECONDS
                if is_late and not reported:
                    late_report.start(here, self._neighbours)
                reported = is_late

    def _look_in_time(self, store: FailureStore) -> Failure | None:
        """Looks; a store whose host has ended without a word does not answer, for ever."""
        limit = process_group.seconds(None) + _NO_ANSWER_SECONDS
        until_report = min(limit, exchange.REPORT_SECONDS)
        asked = heartbeats.Asked.of(lambda: (self._look(store),))
        found = asked.answer(until_report)
        if found is None and limit > until_report:
            if self._neighbours.is_first():
                say(f"[rank {self._rank}] {no_answer(until_report).headline}\n")
            found = asked.answer(limit - until_report)
        if found is not None:
            return found[0]
        self._released.set()  # it is not asked again
        return no_answer(limit)

    def _interrupt_main(self, failure: Failure, store: FailureStore) -> None:
        """Lets the main thread end; ends this process if it does not."""
        if failure.rank == self._rank and self._ending.locked():
            return  # it is ending
        self._failure = failure
        if failure != silent(0) and not self._released.is_set():
            with _store_may_be_gone():
                self._release(store)
        self._interrupt.interrupt(f"Rank {failure.rank} failed first: {failure.headline}")
        if not self._stopped.wait(_FINALLY_SECONDS):
            self._ending.acquire()
            self._end_after(failure)

    def _look(self, store: FailureStore) -> Failure | None:
        """Returns the first failure of the others, if there is one."""
        # Before the store is read, which then has all that an ended process has published.
        gone = self._neighbours.gone()
        if 0 in gone:
            # Rank 0 waits for this rank at an orderly end. Its store may be closed.
            return silent(0)
        try:
            failure = store.first()
            if failure is None and self._rank != 0 and store.has_ended(0):
                self._release(store)
            elif failure is None:
                failure = self._first_silent(gone, store)
        except RuntimeError:
            failure = None if self._released.is_set() else silent(0) if self._rank else lost()
        return failure

    def _first_silent(self, gone: list[int], store: FailureStore) -> Failure | None:
        for rank in gone:
            if not store.has_ended(rank):
                return store.claim(silent(rank))
            self._neighbours.forget(rank)
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
            self._tell(kind, error)
        finally:
            _exit(130 if issubclass(kind, KeyboardInterrupt) else 1)

    def _tell(self, kind: type[BaseException], error: BaseException) -> None:
        """Publishes and shows this rank's failure, after another's if that came first."""
        strip_own_frames(error)
        headline = _headline(kind, error)
        # Now: the others end once they know the failure.
        why = heartbeats.unmatched(error, is_enough=lambda: self._failure is not None)
        first, ended = self._publish(Failure(self._rank, why or headline))
        if first.rank != self._rank:
            self._end_after(first)
        before = f" after rank {', '.join(map(str, ended))} had ended" if ended else ""
        say(f"[rank {self._rank}] failed{before}:\n")
        with contextlib.suppress(OSError):  # standard error is closed
            self._previous_hook(kind, error, error.__traceback__)
        if why := why or heartbeats.unmatched(error, ended):
            say(f"[rank {self._rank}] {why}\n")
        if not self._released.is_set():
            with _store_may_be_gone():
                for _ in self._until_released(self._store, _SHOW_SECONDS):
                    pass

    def _publish(self, own: Failure) -> tuple[Failure, list[int]]:
        """Publishes `own`; returns the first failure and the ranks that had ended in order."""
        # A peer's death may have caused this error; its process disappears a moment later.
        time.sleep(0.1)
        if self._failure is not None:
            return self._failure, []
        if self._released.is_set():
            return own, [0] if self._rank else []

        def published() -> tuple[Failure, list[int]]:
            first = self._look(self._store) or self._store.claim(own)
            return first, [each for each in range(self._world_size) if self._store.has_ended(each)]

        found = heartbeats.within(_STORE_SECONDS, published)
        if found is None:  # rank 0, which may hold it, is stopped
            self._released.set()
        return found or (own, [])

    def _end_after(self, failure: Failure) -> NoReturn:
        """Ends this rank because of another rank's failure."""
        # The failing rank prints first.
        time.sleep(0.2)
        say(f"[rank {self._rank}] ends, as rank {failure.rank} failed first: {failure.headline}\n")
        if failure != silent(0) and not self._released.is_set():
            with _store_may_be_gone():
                self._release(self._store)
        time.sleep(_YIELD_SECONDS)
        _exit(1)


def _headline(kind: type[BaseException], error: BaseException) -> str:
    """Returns the last line of the error without its notes."""
    written = traceback.TracebackException(kind, error, None)
    written.__notes__ = []
    return list(written.format_exception_only())[-1].strip()


def _store_may_be_gone() -> contextlib.suppress:
    # torch reports a lost store by RuntimeErrors, DistNetworkError among them.
    return contextlib.suppress(RuntimeError)


def _exit(code: int) -> NoReturn:
    with contextlib.suppress(Exception):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)
