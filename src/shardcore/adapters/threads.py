"""Which threads may start collectives: those whose order among the others all ranks agree on."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from shardcore.domain.errors import StrategyError


class _Thread(threading.local):
    scopes = 0


# Of the process: whether a thread may start collectives is asked below torch, which hands on
# nothing. Zero outside of a `with`.
_here = _Thread()


@contextmanager
def communicating() -> Iterator[None]:
    """The scope of a distribution: this thread may start collectives in it."""
    _here.scopes += 1
    try:
        yield
    finally:
        _here.scopes -= 1


def check_thread() -> None:
    """Refuse a collective on a thread whose order among the others the ranks do not agree on.

    Raises:
        StrategyError: If this is neither the main thread nor in the scope of a distribution.
    """
    if _here.scopes > 0 or threading.current_thread() is threading.main_thread():
        return
    raise StrategyError(
        f"Thread {threading.current_thread().name!r} came to a collective on a sharded tensor: it "
        "would meet those of the main thread in another order on each rank. Do this on the main "
        "thread (for a callback: set `async_safe = False`); or, if the main thread waits "
        "meanwhile, inside `with distribution.scope():` on this thread."
    )
