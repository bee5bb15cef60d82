"""Threads that may start collectives: those with the same order of collectives on all ranks."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from shardcore.domain.errors import CallProblem


class _Thread(threading.local):
    scopes = 0


# Of the process: it is read below torch, which passes no arguments on. Zero outside a `with`.
_here = _Thread()


@contextmanager
def communicating() -> Iterator[None]:
    """Opens a scope in which this thread may start collectives."""
    _here.scopes += 1
    try:
        yield
    finally:
        _here.scopes -= 1


def check_thread() -> None:
    """Refuses a collective on a thread with another order of collectives on each rank."""
    if _here.scopes > 0 or threading.current_thread() is threading.main_thread():
        return
    raise CallProblem(
        f"Thread {threading.current_thread().name!r} started a collective on a sharded "
        "tensor: each rank may run it in another order, and all would wait for ever. Do this on "
        "the main thread (for a callback: set `async_safe = False`); or, if the main thread waits "
        "meanwhile, inside `with distribution.scope():` on this thread.",
        name=threading.current_thread().name,
    )
