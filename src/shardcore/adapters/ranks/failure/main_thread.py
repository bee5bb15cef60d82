"""The main thread, as another thread sees and interrupts it: its line, its collective, its cell.

An interrupt raises an error there, so that the `finally` blocks of the program run. No thread can
raise in another one: a signal of this process can, also while the main thread sleeps. Where the
signal meets a finalizer or a callback of a weak reference, Python ignores the error: it is raised
again a moment later.

A rank of a notebook (ADR 57) goes on after an error of a cell that all ranks have. If one waits for
another in vain, they are no longer at one point of the program: the error ends all ranks then.
"""

import os
import select
import signal
import socket
import sys
import threading
import time
import weakref
from collections.abc import Callable, Hashable
from contextlib import ExitStack, suppress
from itertools import islice
from pathlib import Path
from traceback import walk_stack
from types import FrameType
from typing import Any

import attrs

from shardcore.adapters.ranks.failure.end import headline_of
from shardcore.adapters.ranks.job import exchange
from shardcore.adapters.ranks.job.signed_store import SignedStore
from shardcore.adapters.torch_private import collectives
from shardcore.domain.errors import OtherRankFailed
from shardcore.reporting.errors import CAPTURED, user_line

# The seconds after which a rank that has not moved publishes where it is.
STAY_SECONDS = 6.0
# The words with which a rank says that it waits in a collective.
_WAITS = "waits in another collective"
# Parts of the file names of Python code that starts collectives or waits for them. This file is
# none of them: its own frames would pass for a collective.
_FILES = (
    collectives.__file__,
    str(Path(__file__).with_name("heartbeats.py")),  # a collective has waited in vain
    *("/torch/distributed/", CAPTURED, "torchinductor"),
)
# A signal that neither Python nor torch uses. A program that uses it keeps it.
_OURS = signal.SIGRTMIN + 9
# The seconds until an error is tried again that Python has ignored, or that waits for a handler.
_AGAIN_SECONDS = 0.05
# The most seconds that an error waits while the main thread handles another one.
HANDLER_SECONDS = 2.0


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


class Interrupt:
    """Signal handlers and a hook of this process, until `close`. Made on the main thread.

    An error that is on its way runs the `finally` blocks by itself, so a new one waits for its
    end. But a program may do all of its work inside of `except`: the wait has a limit.

    Args:
        is_ending: Returns whether the main thread ends the process already, and goes on.

    Attributes:
        raised_at: When the last error was raised; None before.
        is_terminated: Whether SIGTERM has come.
        is_heard: Whether a thread waits for SIGTERM. If not, it raises an error at once.
    """

    def __init__(self, is_ending: Callable[[], bool]) -> None:
        self._is_ending = is_ending
        self._reason = "SIGTERM ends this process."
        self._until = 0.0
        self.raised_at: float | None = None
        self.is_terminated = False
        self.is_heard = True
        self._undo = ExitStack()
        for number in (_OURS, signal.SIGTERM):
            if signal.getsignal(number) is signal.SIG_DFL:
                self._undo.callback(signal.signal, number, signal.SIG_DFL)
                signal.signal(number, self._handle)
        self._woken, self._wakes = socket.socketpair()
        for end in (self._woken, self._wakes):
            end.setblocking(False)
            self._undo.callback(end.close)
        self._hear_in_c()
        _reset_in_children(self, (_OURS, signal.SIGTERM))
        self._previous_hook = sys.unraisablehook
        sys.unraisablehook = self._on_ignored

    def interrupt(self, reason: str, since: float | None = None) -> None:
        """Raises an OtherRankFailed with `reason` on the main thread.

        Args:
            reason: Its message.
            since: When this rank has learned of the reason; None for now.
        """
        self._reason = reason
        self._until = (time.monotonic() if since is None else since) + HANDLER_SECONDS
        self.raised_at = None
        self._signal_main()

    def wait(self, seconds: float) -> None:
        """Waits for `seconds` on another thread; less if SIGTERM comes, or `wake` is called.

        `is_terminated` says then whether SIGTERM has come, also while the main thread is in a call
        of C that does not return.
        """
        with suppress(OSError, ValueError):  # it is closed
            if select.select([self._woken], [], [], seconds)[0]:
                self.is_terminated |= signal.SIGTERM in self._woken.recv(4096)

    def wake(self, number: int = 0) -> None:
        """Ends a `wait`."""
        with suppress(OSError):  # it is full, or closed
            self._wakes.send(bytes([number]))

    def close(self) -> None:
        """Restores the handlers and the hook."""
        self._undo.close()
        if sys.unraisablehook == self._on_ignored:
            sys.unraisablehook = self._previous_hook

    def reset_in_child(self, numbers: tuple[int, ...]) -> None:
        """Restores, in a forked process, the default actions of signals that are handled here."""
        for number in numbers:
            if signal.getsignal(number) == self._handle:
                signal.signal(number, signal.SIG_DFL)
        self._unhear()

    def _hear_in_c(self) -> None:
        """Lets Python's handler in C, which runs at once, write the number of each signal."""
        if signal.getsignal(signal.SIGTERM) != self._handle:
            return
        before = signal.set_wakeup_fd(self._wakes.fileno(), warn_on_full_buffer=False)
        if before == -1:
            self._undo.callback(self._unhear)
        else:  # an event loop of the program reads them, and our own handler writes
            signal.set_wakeup_fd(before)

    def _unhear(self) -> None:
        before = signal.set_wakeup_fd(-1)
        if before not in (-1, self._wakes.fileno()):
            signal.set_wakeup_fd(before)

    def _signal_main(self) -> None:
        main = threading.main_thread().ident
        if main is not None and signal.getsignal(_OURS) == self._handle:
            signal.pthread_kill(main, _OURS)

    def _try_again(self) -> None:
        again = threading.Timer(_AGAIN_SECONDS, self._signal_main)
        again.daemon = True
        again.start()

    def _on_ignored(self, ignored: Any) -> None:
        if isinstance(ignored.exc_value, OtherRankFailed):
            self._try_again()
        else:
            self._previous_hook(ignored)

    def _handle(self, number: int, _frame: FrameType | None) -> None:
        if number == signal.SIGTERM:
            self.is_terminated, self._until = True, time.monotonic() + HANDLER_SECONDS
        if number == signal.SIGTERM and self.is_heard:
            self.wake()
        elif not self._is_ending():
            if sys.exception() is not None and time.monotonic() < self._until:
                self._try_again()
                return
            self.raised_at = time.monotonic()
            raise OtherRankFailed(self._reason)


def _reset_in_children(interrupt: Interrupt, numbers: tuple[int, ...]) -> None:
    """Restores the default actions of `numbers` in processes that are forked from now on.

    A handler that they inherit would lose a signal that comes before their state is ready. So the
    signals are blocked from the fork until the child has its actions. Python keeps these functions
    to its end; they do nothing once `interrupt` is gone.
    """
    alive, of_thread = weakref.ref(interrupt), threading.local()

    def before() -> None:
        if alive() is not None:
            of_thread.mask = signal.pthread_sigmask(signal.SIG_BLOCK, numbers)

    def in_parent() -> None:
        mask = vars(of_thread).pop("mask", None)
        if mask is not None:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)

    def in_child() -> None:
        own = alive()
        if own is not None:
            own.reset_in_child(numbers)
        in_parent()

    os.register_at_fork(before=before, after_in_parent=in_parent, after_in_child=in_child)
