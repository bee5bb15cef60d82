"""The failure watch: a rank that fails ends all ranks, with its own error first (ADR 7).

Every rank watches a `FailureStore` from a thread. A failing rank publishes its uncaught exception
there; the others print it and exit. A process of this host that is killed, also for memory, is
found by its process number. One of another host is found by its launcher or the next collective.
The main thread of a rank that is to end gets an `OtherRankFailed`, and some seconds for its
`finally` blocks. SIGTERM to one rank ends all likewise, in `fit` at one point (ADR 54).

A rank that ends in order publishes that. Rank 0, which holds the store if there is no launcher,
exits last, or when all others know that the store will close. They stop to watch then: the next
collective shows later failures.
"""

import atexit
import os
import sys
import threading
import time
from itertools import count
from types import TracebackType

from shardcore.adapters.ranks.failure import heartbeats
from shardcore.adapters.ranks.failure.end import (
    SHOW_SECONDS,
    STORE_SECONDS,
    End,
    Termination,
    continues,
    headline_of,
    leave,
    store_may_be_gone,
)
from shardcore.adapters.ranks.failure.main_thread import Cell, Interrupt, MainThread
from shardcore.adapters.ranks.failure.neighbours import Neighbours
from shardcore.adapters.ranks.failure.store import (
    TERMINATED,
    Failure,
    FailureStore,
    Request,
    lost,
    no_answer,
    silent,
    within,
)
from shardcore.adapters.ranks.job import exchange, process_group
from shardcore.adapters.ranks.job.signed_store import SignedStore
from shardcore.domain.errors import text_of
from shardcore.reporting.errors import say, show_error, strip_own_frames

_POLL_SECONDS = 1.0
# The same while the ranks agree where they end.
_AGREEING_SECONDS = 0.1
# The seconds that the main thread has to end, with its `finally` blocks.
_FINALLY_SECONDS = 5.0
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
        own = FailureStore(exchange.store_for_thread(key), rank)
        self._end = End(rank, world_size, own)
        stores = FailureStore(exchange.store_for_thread(key), rank), exchange.store_for_thread()
        self._thread = threading.Thread(
            target=self._watch, args=stores, name="shardcore-failure-watch", daemon=True
        )
        self._stopped = threading.Event()
        self._exits = False  # with an error code, which the others know
        self.cell = Cell()
        self.termination = Termination(rank, world_size)
        self._interrupt = Interrupt(self._end.begun.locked)
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
        exchange.publish_status(exchange.store(), "")
        heartbeats.send(exchange.store(), 0, MainThread().look())
        neighbours, name = Neighbours.meet(rank)
        # An earlier watch of the same job has left its keys in the store, under another name.
        return cls(name, rank, world_size, neighbours)

    def exits(self, code: object) -> None:
        """Publishes that this rank ends by `sys.exit(code)`, which is known before its end."""
        store, own = self._end.store, Failure(self._rank, f"SystemExit: {text_of(code)}")
        self._exits = True
        within(STORE_SECONDS, lambda: store.claim(own))

    def stop(self) -> None:
        """Ends this rank's part in the job in order. Does nothing the second time.

        Rank 0 waits, at most 30 seconds, until every other rank has ended or knows that rank 0
        has. A failure that is published meanwhile ends this rank like any other.
        """
        if self._stopped.is_set() or os.getpid() != self._pid:
            return
        self._end.begun.acquire()
        self._stopped.set()
        self._interrupt.wake()
        self._thread.join(5 * _POLL_SECONDS + _LEAVE_SECONDS)  # a lost store never answers it
        if self._end.failure is not None:
            self._end.after(self._end.failure)
        if self._exits:
            self._end.wait_for_readers(SHOW_SECONDS)
        self._interrupt.close()
        if sys.excepthook == self._on_uncaught:
            sys.excepthook = self._previous_hook
        atexit.unregister(self.stop)
        self._end.begun.release()

    def _leave(self, store: FailureStore, status_store: SignedStore) -> None:
        exchange.publish_status(status_store, exchange.ENDED)
        store.end()
        if self._rank != 0:
            self._end.release(store)
            return
        looks = (self._look(store) for _ in self._end.until_released(store, _LEAVE_SECONDS))
        of_others = (
            failure for failure in looks if failure is not None and failure.rank != self._rank
        )
        self._end.failure = next(of_others, None)

    def _watch(self, store: FailureStore, status_store: SignedStore) -> None:
        main, published, reported = MainThread(), "", False
        for number in count(1):
            self._interrupt.wait(_AGREEING_SECONDS if self.termination.since else _POLL_SECONDS)
            if self._end.released.is_set():
                self._interrupt.is_heard = False
                return
            if self._stopped.is_set():
                with store_may_be_gone():
                    self._leave(store, status_store)
                return
            failure = self._look_in_time(store)
            if failure is not None:
                if failure.code == TERMINATED and self.termination.goes_on:
                    continue  # it saves with the others, and raises by itself
                self._interrupt_main(failure, store)
                return
            state = main.look()
            with store_may_be_gone():
                heartbeats.send(status_store, number, state)
                if (status := self.cell.status or str(state)) != published:
                    exchange.publish_status(status_store, published := status)
                if self.cell.ends_all(status_store):
                    store.claim(Failure(self._rank, self.cell.headline))
                is_late = state.waits and state.seconds >= exchange.REPORT_SECONDS
                if is_late and not reported:
                    heartbeats.report_late_ranks(state, self._neighbours)
                reported = is_late

    def _look_in_time(self, store: FailureStore) -> Failure | None:
        """Looks once, on another thread: a store whose host has died never answers."""
        limit = process_group.seconds(None) + _NO_ANSWER_SECONDS
        until_report = min(limit, exchange.REPORT_SECONDS)
        request = Request.of(lambda: (self._look_on_thread(store),))
        answer = request.answer(until_report)
        if answer is None and limit > until_report:
            if self._neighbours.is_first():
                say(f"[rank {self._rank}] {no_answer(until_report).headline}\n")
            answer = request.answer(limit - until_report)
        if answer is not None:
            return answer[0]
        self._end.released.set()  # it is not asked again
        return no_answer(limit)

    def _interrupt_main(self, failure: Failure, store: FailureStore) -> None:
        """Lets the main thread end; ends this process if it does not."""
        if failure.rank == self._rank and (self._exits or self._end.begun.locked()):
            return  # it is ending
        self._end.failure = failure
        self._end.release_after(failure, store)
        begun, is_terminated = time.monotonic(), failure.code == TERMINATED
        if not self.termination.is_raised:
            first = "" if is_terminated else f"Rank {failure.rank} failed first: "
            since = self.termination.since if is_terminated else None
            self._interrupt.interrupt(f"{first}{failure.headline}", since)
        while time.monotonic() < (self._interrupt.raised_at or begun) + _FINALLY_SECONDS:
            if self._stopped.wait(0.1):
                return
        self._end.begun.acquire()
        self._end.after(failure)

    def _look(self, store: FailureStore) -> Failure | None:
        """Looks for the first failure of the others: at their processes, then into the store."""
        # Before the store is read, which then has all that an ended process has published.
        gone = self._neighbours.gone()
        if 0 in gone:  # at an orderly end it waits for this rank; its store may be closed
            return silent(0)
        try:
            failure = store.first()
            if failure is None and self._rank != 0 and store.has_ended(0):
                self._end.release(store)
            elif failure is None:
                failure = self._first_silent(gone, store)
        except RuntimeError:
            failure = None if self._end.released.is_set() else silent(0) if self._rank else lost()
        return failure

    def _look_on_thread(self, store: FailureStore) -> Failure | None:
        """Looks for a failure, then whether this rank is to end after SIGTERM now."""
        failure = self._look(store)
        if failure is None and not self._end.released.is_set():
            with store_may_be_gone():
                end = self.termination.look(store, self._interrupt.is_terminated)
                failure = None if end is None else store.claim(end)
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
        if os.getpid() != self._pid or continues(trace):
            self._previous_hook(kind, error, trace)
            return
        self._end.begun.acquire()
        code = 130 if issubclass(kind, KeyboardInterrupt) else 1
        # No error may stop this: the other ranks and atexit would wait for this rank.
        try:
            self._report(kind, error)
        except BaseException as problem:  # noqa: BLE001 - the error is shown all the same
            self._end.report_briefly(error, problem, self._previous_hook)
        finally:
            leave(TERMINATED if self._interrupt.is_terminated else code)

    def _report(self, kind: type[BaseException], error: BaseException) -> None:
        strip_own_frames(error)
        headline = headline_of(kind, error)
        # Now: the others end once they know the failure.
        why = heartbeats.unmatched(error, is_enough=lambda: self._end.failure is not None)
        first, ended = self._publish(Failure(self._rank, why or headline))
        if first.rank != self._rank or first.code == TERMINATED:
            self._end.after(first)
        before = f" after rank {', '.join(map(str, ended))} had ended" if ended else ""
        say(f"[rank {self._rank}] failed{before}:\n")
        show_error(self._previous_hook, error)
        if why := why or heartbeats.unmatched(error, ended):
            say(f"[rank {self._rank}] {why}\n")
        if not self._end.released.is_set():
            self._end.wait_for_readers(SHOW_SECONDS)

    def _publish(self, own: Failure) -> tuple[Failure, list[int]]:
        """Publishes `own`; returns the first failure and the ranks that had ended in order."""
        # A peer's death may have caused this error; its process disappears a moment later.
        time.sleep(0.1)
        if self._end.failure is not None:
            return self._end.failure, []
        if self._end.released.is_set():
            return own, [0] if self._rank else []
        store = self._end.store

        def publish() -> tuple[Failure, list[int]]:
            cause = self.termination.cause(own, self._interrupt.is_terminated)
            first = self._look(store) or store.claim(cause)
            return first, [rank for rank in range(self._world_size) if store.has_ended(rank)]

        answer = within(STORE_SECONDS, publish)
        if answer is None:  # rank 0, which may hold it, is stopped
            self._end.released.set()
        return answer or (own, [])
