"""The end of this rank: its last message, its exit, and the time when its store may close."""

import contextlib
import inspect
import os
import re
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from types import TracebackType
from typing import NoReturn

import attrs

from shardcore.adapters.ranks.failure.requests import within
from shardcore.adapters.ranks.failure.store import TERMINATED, Failure, FailureStore, silent
from shardcore.domain.errors import describe_error, one_line
from shardcore.reporting.errors import RANK_COULD_NOT, Hook, say, show_error

# The others exit a little later, so that a launcher sees the failing rank exit first.
_YIELD_SECONDS = 1.5
# The seconds that a store may take to answer a rank that fails.
STORE_SECONDS = 5.0
# The most seconds that a failing rank waits until the others have read its error.
SHOW_SECONDS = 3.0


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
    """Returns whether the program goes on after an error that the hook gets.

    Cython shows an error that it ignores so, such as that of a destructor of h5py.
    """
    # Not walk_stack(None), which skips four frames on Python 3.12: fewer may be left.
    stack = [frame for frame, _ in traceback.walk_stack(inspect.currentframe())]
    is_running = any(frame.f_code.co_name == "<module>" for frame in stack)
    return is_running and trace is not None and trace.tb_frame not in stack


def headline_of(kind: type[BaseException], error: BaseException) -> str:
    """Returns the error in one line, without its notes but that on a rank and its file."""
    try:
        written = traceback.TracebackException(kind, error, None)
        notes = [note for note in written.__notes__ or () if re.match(RANK_COULD_NOT, note)]
        written.__notes__ = []
        return one_line(" ".join([list(written.format_exception_only())[-1], *notes[:1]]))
    except Exception:  # noqa: BLE001 - of a property of the error, or of notes that are no texts
        return one_line(describe_error(error))
