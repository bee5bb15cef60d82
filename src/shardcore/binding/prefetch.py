"""Prefetch: the batch of the next step is drawn while the device computes this one (ADR 58)."""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import attrs


@attrs.frozen(eq=False)
class Drawn:
    """A batch that was drawn before its step.

    Args:
        batch: As the source gives it.
        rows: Returns the batch as the step takes it: the rows of this rank, on its device.
    """

    batch: object
    rows: Callable[[], Any]


Draw = Callable[[Iterator[object]], Drawn]


@attrs.define(eq=False)
class Prefetch:
    """The batches of a data adapter, of which that of the next step may be drawn ahead.

    All of it runs on the main thread, after a step has started its kernels: the source may run code
    of the user or collectives, which keep the order that they have without prefetch.

    Attributes:
        left: The batches of this epoch that were not drawn yet; None if their number is unknown.
    """

    left: int | None = attrs.field(default=None, init=False)
    _source: Iterable[object] = attrs.field(default=(), init=False)
    _draw: Draw | None = attrs.field(default=None, init=False)
    _is_shared: bool = attrs.field(default=False, init=False)
    _batches: Iterator[object] = attrs.field(factory=lambda: iter(()), init=False)
    _ahead: Drawn | Exception | None = attrs.field(default=None, init=False)
    _taken: Drawn | None = attrs.field(default=None, init=False)

    def read(
        self, source: Iterable[object], draw: Draw | None, is_shared: bool = False
    ) -> "Prefetch":
        """Reads another source from now on.

        Args:
            source: The batches.
            draw: Draws a batch ahead; None if none may be.
            is_shared: Whether several ranks read: they may compare what they draw.
        """
        self._source, self._draw, self._is_shared = source, draw, is_shared
        return self

    def __iter__(self) -> "Prefetch":
        """Makes the iterator of the source."""
        self._batches, self._ahead, self._taken = iter(self._source), None, None
        return self

    def __next__(self) -> object:
        """Returns the next batch.

        Raises:
            Exception: What the source has raised in place of it.
        """
        ahead, self._ahead, self._taken = self._ahead, None, None
        if ahead is None:
            self._count()
            return next(self._batches)
        if isinstance(ahead, Exception):
            raise ahead
        self._taken = ahead
        return ahead.batch

    def rows(self, batch: object) -> Any:
        """Returns the batch as its step takes it; None if it was not drawn ahead."""
        drawn, self._taken = self._taken, None
        return drawn.rows() if drawn is not None and drawn.batch is batch else None

    def fill(self) -> None:
        """Draws the batch of the next step, if the epoch has one.

        An error of one process is raised where the batch is asked for, as without prefetch. One of
        several ranks is raised at once: the others may wait for this rank's batch already, and a
        callback that saves would wait for them.
        """
        if self._draw is None or self._ahead is not None or self.left == 0:
            return
        self._count()
        try:
            self._ahead = self._draw(self._batches)
        except StopIteration as end:
            self._ahead = end
        except Exception as error:
            if self._is_shared:
                raise
            self._ahead = error

    def _count(self) -> None:
        if self.left:
            self.left -= 1
