"""The end of all ranks after SIGTERM: at one point of the program, after they have saved (ADR 54).

A launcher sends SIGTERM to one rank or to all, at any time. While a program passes points, such as
the ends of batches, no rank may stop at one that others have left behind: they would wait for it in
a collective. So each rank publishes the last point that it has passed, and goes no further than the
next one until all have done so. They meet at the point after the farthest one. A rank that waits in
a collective does so too, by the thread of its watch, so that no rank waits in vain.

Outside of such a part, and if the point does not come in time, the ranks end where they are.
"""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import attrs

from shardcore.adapters.ranks.failure.store import Failure, FailureStore, terminated
from shardcore.domain.errors import OtherRankFailed, describe_error, one_line
from shardcore.reporting.errors import say

_LOOK_SECONDS = 0.05


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
        """Returns the cause of this rank's failure: SIGTERM, if that came before it."""
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

    @contextmanager
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
