"""Interrupts of the main thread: another thread, or SIGTERM, raises an error there.

The `finally` blocks of the program run. No thread can raise in another one: a signal of this
process can, also while the main thread sleeps. Where the signal meets a finalizer or a callback of
a weak reference, Python ignores the error: it is raised again a moment later.
"""

import os
import signal
import sys
import threading
from collections.abc import Callable
from contextlib import ExitStack
from types import FrameType
from typing import Any

from shardcore.domain.errors import OtherRankFailed

# A signal that neither Python nor torch uses. A program that uses it keeps it.
_OURS = signal.SIGRTMIN + 9
# The seconds until an error that Python has ignored is raised again.
_AGAIN_SECONDS = 0.05


class Interrupt:
    """Signal handlers and a hook of this process, until `close`. Made on the main thread.

    Args:
        is_ending: Returns whether the main thread ends the process already, and goes on.
    """

    def __init__(self, is_ending: Callable[[], bool]) -> None:
        self._pid = os.getpid()
        self._is_ending = is_ending
        self._reason = "SIGTERM ends this process."
        self._undo = ExitStack()
        for number in (_OURS, signal.SIGTERM):
            if signal.getsignal(number) is signal.SIG_DFL:
                self._undo.callback(signal.signal, number, signal.SIG_DFL)
                signal.signal(number, self._handle)
        self._previous_hook = sys.unraisablehook
        sys.unraisablehook = self._on_ignored

    def interrupt(self, reason: str) -> None:
        """Raises an OtherRankFailed with `reason` on the main thread."""
        self._reason = reason
        main = threading.main_thread().ident
        if main is not None and signal.getsignal(_OURS) == self._handle:
            signal.pthread_kill(main, _OURS)

    def close(self) -> None:
        """Restores the handlers and the hook."""
        self._undo.close()
        if sys.unraisablehook == self._on_ignored:
            sys.unraisablehook = self._previous_hook

    def _on_ignored(self, ignored: Any) -> None:
        if not isinstance(ignored.exc_value, OtherRankFailed):
            self._previous_hook(ignored)
            return
        again = threading.Timer(_AGAIN_SECONDS, self.interrupt, (self._reason,))
        again.daemon = True
        again.start()

    def _handle(self, number: int, _frame: FrameType | None) -> None:
        if os.getpid() != self._pid:  # a worker that was forked: as if there were no handler
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
            return
        # An error that is on its way runs the `finally` blocks by itself.
        if sys.exception() is None and not self._is_ending():
            raise OtherRankFailed(self._reason)
