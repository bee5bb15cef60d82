"""The end of this rank, after a failure or SIGTERM: its last message, and its exit.

After SIGTERM all ranks end at one point of the program, after they have saved (ADR 54). A launcher
sends SIGTERM to one rank or to all, at any time. While a program passes points, such as the ends of
batches, no rank may stop at one that others have left behind: they would wait for it in a
collective. So each rank publishes the last point that it has passed, and goes no further than the
next one until all have done so. They meet at the point after the farthest one. A rank that waits in
a collective does so too, by the thread of its watch, so that no rank waits in vain.

Outside of such a part, and if the point does not come in time, the ranks end where they are.
"""

import contextlib
import inspect
import os
import re
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import NoReturn

import attrs

from shardcore.adapters.ranks.failure.store import (
    TERMINATED,
    Failure,
    FailureStore,
    silent,
    terminated,
    within,
)
from shardcore.domain.errors import OtherRankFailed, describe_error, one_line
from shardcore.reporting.errors import RANK_COULD_NOT, Hook, say, show_error

# The others exit a little later, so that a launcher sees the failing rank exit first.
_YIELD_SECONDS = 1.5
# The seconds that a store may take to answer a rank that fails.
STORE_SECONDS = 5.0
# The most seconds that a failing rank waits until the others have read its error.
SHOW_SECONDS = 3.0
# The seconds between two looks for the point of all ranks.
_LOOK_SECONDS = 0.05


@attrs.define(eq=False)
class End:
    """The end of this rank.

    Args:
        rank: The rank.
        world_size: The number of ranks.
        store: The store, on a connection for the thread that ends this rank.

    Attributes:
        failure: The failure after which this rank ends: of another one, or SIGTERM.
        begun: The thread that ends this rank acquires it, and never releases it.
        released: Set once rank 0 has ended in order: its store may close, and is not used any more.
    """

    rank: int
    world_size: int
    store: FailureStore
    failure: Failure | None = attrs.field(default=None, init=False)
    begun: threading.Lock = attrs.field(factory=threading.Lock, init=False)
    released: threading.Event = attrs.field(factory=threading.Event, init=False)

    def release(self, store: FailureStore) -> None:
        """Tells rank 0 that this rank needs its store no more."""
        # Set first: rank 0 may exit before its reply arrives.
        self.released.set()
        store.release()

    def release_after(self, failure: Failure, store: FailureStore) -> None:
        """Does so, once, unless the store has ended with its rank."""
        if failure != silent(0) and not self.released.is_set():
            with store_may_be_gone():
                self.release(store)

    def until_released(self, store: FailureStore, seconds: float) -> Iterator[None]:
        """Yields until all other ranks have released the store, at most for `seconds`."""
        deadline, ranks = time.monotonic() + seconds, self.world_size - 1 + self.released.is_set()
        while store.count_released() < ranks and time.monotonic() < deadline:
            yield
            time.sleep(0.05)

    def wait_for_readers(self, seconds: float) -> None:
        """Waits until all other ranks have read the failure, at most for `seconds`."""
        with store_may_be_gone():
            for _ in self.until_released(self.store, seconds):
                pass

    def after(self, failure: Failure) -> NoReturn:
        """Ends this rank because of another rank's failure, or of SIGTERM."""
        # The failing rank prints first.
        time.sleep(0.2)
        first = f", as rank {failure.rank} failed first" if failure.code != TERMINATED else ""
        say(f"[rank {self.rank}] ends{first}: {failure.headline}\n")
        self.release_after(failure, self.store)
        if failure.code != TERMINATED:
            time.sleep(_YIELD_SECONDS)
        elif self.rank == 0:  # its store may be here
            self.wait_for_readers(_YIELD_SECONDS)
        leave(failure.code)

    def report_briefly(self, error: BaseException, problem: BaseException, hook: Hook) -> None:
        """Publishes and shows the error of this rank, whose full report raised `problem`."""
        say(f"[rank {self.rank}] failed; its report did too ({describe_error(problem)}):\n")
        show_error(hook, error)
        own = Failure(self.rank, headline_of(type(error), error))
        if within(STORE_SECONDS, lambda: self.store.claim(own)) is not None:
            self.wait_for_readers(SHOW_SECONDS)


@attrs.define(eq=False)
class Termination:
    """The knowledge of this rank about SIGTERM: the main thread passes points, another one looks.

    Args:
        rank: This rank.
        world_size: The number of ranks.

    Attributes:
        since: When this rank has learned of SIGTERM; None before.
    """

    rank: int
    world_size: int
    _lock: threading.Lock = attrs.field(factory=threading.Lock, init=False)
    _runs: int = attrs.field(default=0, init=False)
    _passed: int = attrs.field(default=0, init=False)
    _seconds: float | None = attrs.field(default=None, init=False)  # None: it passes no points
    _first: int | None = attrs.field(default=None, init=False)  # the rank to which SIGTERM came
    _has_points: bool = attrs.field(default=False, init=False)
    since: float | None = attrs.field(default=None, init=False)
    _until: float = attrs.field(default=0.0, init=False)
    _target: int | None = attrs.field(default=None, init=False)
    _is_raised: bool = attrs.field(default=False, init=False)

    def cause(self, own: Failure, is_terminated: bool) -> Failure:
        """Chooses the cause of this rank's failure: SIGTERM, if that came before it."""
        if self._first is not None:
            return terminated(self._first)
        return terminated(self.rank) if is_terminated else own

    @property
    def is_raised(self) -> bool:
        """Whether the main thread has raised its error, at the point of all ranks."""
        return self._is_raised

    @property
    def goes_on(self) -> bool:
        """Whether the main thread is on its way to the point of all ranks, or saves there."""
        is_on_way = self._target is not None and not self._is_raised
        return is_on_way and time.monotonic() < self._until

    @contextlib.contextmanager
    def points(self, seconds: float) -> Iterator[None]:
        """Opens a part of the program in which all ranks pass the same points.

        Args:
            seconds: The most seconds from SIGTERM until the ranks have met at one, and saved.
        """
        with self._lock:
            self._runs, self._passed, self._seconds = self._runs + 1, 0, seconds
        try:
            yield
        finally:
            self._seconds = None

    def pass_point(self, save: Callable[[], None]) -> None:
        """Passes a point; at that of all ranks after SIGTERM, calls `save` and raises.

        Raises:
            OtherRankFailed: There.
        """
        with self._lock:
            self._passed += 1
        if self._first is None or not self._has_points:
            return
        while self._target is None:  # the thread interrupts this one if it does not come in time
            time.sleep(_LOOK_SECONDS)
        if self._passed < self._target:
            return
        headline = terminated(self._first).headline
        try:
            save()
        except OtherRankFailed:
            raise
        except Exception as error:
            why = one_line(describe_error(error))
            say(f"[rank {self.rank}] could not save after {headline}: {why}\n")
            raise OtherRankFailed(headline) from error
        finally:
            self._is_raised = True
        raise OtherRankFailed(headline)

    def look(self, store: FailureStore, is_terminated: bool) -> Failure | None:
        """Looks for SIGTERM; returns the end of this rank, None while it may go on.

        Args:
            store: The store, on a connection of this thread.
            is_terminated: Whether SIGTERM came to this rank.
        """
        if self._first is None:
            first = store.request_end(self.rank) if is_terminated else store.sigterm_rank()
            if first is None:
                return None
            store.publish_point(self._begin(first))
        assert self._first is not None
        if self._target is None and self._has_points:
            self._agree(store.points(self.world_size))
        is_late = not self._has_points or time.monotonic() >= self._until
        return terminated(self._first) if is_late or self._is_raised else None

    def _begin(self, first: int) -> tuple[int, int] | None:
        """Notes the rank to which SIGTERM came; returns the point that this rank has passed."""
        with self._lock:
            self._has_points = self._seconds is not None
            self.since = time.monotonic()
            self._until = self.since + (self._seconds or 0.0)
            self._first = first
            return (self._runs, self._passed) if self._has_points else None

    def _agree(self, points: list[tuple[int, int] | None] | None) -> None:
        if points is None:
            return
        if any(point is None or point[0] != self._runs for point in points):
            self._has_points = False  # a rank is elsewhere
        else:
            self._target = 1 + max(point[1] for point in points if point is not None)


def store_may_be_gone() -> contextlib.suppress:
    """Opens a context in which torch's errors for a lost store are ignored."""
    # They are RuntimeErrors, DistNetworkError among them.
    return contextlib.suppress(RuntimeError)


def leave(code: int) -> NoReturn:
    """Ends the process with an exit code. The end of an interpreter can wait for its peers."""
    with contextlib.suppress(Exception):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)


def continues(trace: TracebackType | None) -> bool:
    """Tells whether the program goes on after an error that the hook gets.

    Cython shows an error that it ignores so, such as that of a destructor of h5py.
    """
    # Not walk_stack(None), which skips four frames on Python 3.12: fewer may be left.
    stack = [frame for frame, _ in traceback.walk_stack(inspect.currentframe())]
    is_running = any(frame.f_code.co_name == "<module>" for frame in stack)
    return is_running and trace is not None and trace.tb_frame not in stack


def headline_of(kind: type[BaseException], error: BaseException) -> str:
    """Formats the error in one line, without its notes but that on a rank and its file."""
    try:
        written = traceback.TracebackException(kind, error, None)
        notes = [note for note in written.__notes__ or () if re.match(RANK_COULD_NOT, note)]
        written.__notes__ = []
        return one_line(" ".join([list(written.format_exception_only())[-1], *notes[:1]]))
    except Exception:  # noqa: BLE001 - of a property of the error, or of notes that are no texts
        return one_line(describe_error(error))
