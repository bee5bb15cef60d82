"""The state of the main thread: its line, the collective in which it waits, its cell of a notebook.

A rank of a notebook (ADR 57) goes on after an error of a cell that all ranks have. If one waits for
another in vain, they are no longer at one point of the program: the error ends all ranks then.
"""

import sys
import threading
import time
from collections.abc import Hashable
from itertools import islice
from pathlib import Path
from traceback import walk_stack
from types import FrameType

import attrs

from shardcore.adapters.ranks.failure.end import headline_of
from shardcore.adapters.ranks.job import exchange
from shardcore.adapters.ranks.job.signed_store import SignedStore
from shardcore.adapters.torch_private import collectives
from shardcore.reporting.errors import CAPTURED, user_line

# The seconds after which a rank that has not moved publishes where it is.
STAY_SECONDS = 6.0
# The words with which a rank says that it waits in a collective.
_WAITS = "waits in another collective"
# Parts of the file names of Python code that starts collectives or waits for them.
_FILES = (
    collectives.__file__,
    str(Path(__file__).with_name("heartbeats.py")),  # a collective has waited in vain
    *("/torch/distributed/", CAPTURED, "torchinductor"),
)


@attrs.frozen
class ThreadState:
    """The state of the main thread.

    Args:
        waits: Whether it is in a collective of tensors.
        seconds: How long it has not moved.
        line: The line of the user's code.
    """

    waits: bool
    seconds: float
    line: str

    def __str__(self) -> str:
        """Describes where it waits, as a predicate; empty while it moves."""
        if not self.waits or self.seconds < STAY_SECONDS:
            return ""
        return f"{_WAITS} ({self.line})"


def _is_in_collective(status: str) -> bool:
    """Tells by its status whether a rank waits in a collective."""
    return status.startswith(_WAITS)


@attrs.define
class MainThread:
    """The main thread, as another thread sees it."""

    _stay: Hashable = attrs.field(default=None, init=False)
    _since: float = attrs.field(default=0.0, init=False)

    def look(self) -> ThreadState:
        """Looks at the main thread once: at its line, and since when it has been there."""
        main = threading.main_thread().ident or 0
        # Nothing keeps the dict: with this frame in it, it would keep the tensors of all frames.
        frame = sys._current_frames().get(main)  # noqa: SLF001 - documented, in spite of its name
        stay = None if frame is None else (id(frame), frame.f_lasti)
        if stay != self._stay:
            self._stay, self._since = stay, time.monotonic()
        return ThreadState(_is_collective(frame), time.monotonic() - self._since, user_line(frame))


def _is_collective(frame: FrameType | None) -> bool:
    # torch's own Python may be between the collective and the code that starts it.
    files = (
        [caller.f_code.co_filename for caller, _ in islice(walk_stack(frame), 8)] if frame else []
    )
    return any(part in file for file in files for part in _FILES)


@attrs.define
class Cell:
    """The error with which the cell has ended: the main thread notes it, the watch publishes it.

    Attributes:
        headline: The error in a line; empty if there is none, or while a cell runs.
    """

    headline: str = attrs.field(default="", init=False)
    _waited_in_vain: bool = attrs.field(default=False, init=False)

    def note(self, error: BaseException | None) -> None:
        """Notes the error of the cell; None if there is none, or if another cell begins."""
        self._waited_in_vain = getattr(error, "waited_in_vain", False)
        self.headline = "" if error is None else headline_of(type(error), error)

    @property
    def status(self) -> str:
        """The status of the rank after the error, as a predicate; empty without one."""
        return f"has ended its cell with {self.headline}" if self.headline else ""

    def ends_all(self, shared: SignedStore) -> bool:
        """Tells whether this rank has waited in vain, or another one waits in a collective.

        Nothing can interrupt a collective.
        """
        if not self.headline:
            return False
        return self._waited_in_vain or any(
            map(_is_in_collective, exchange.statuses(shared).values())
        )
