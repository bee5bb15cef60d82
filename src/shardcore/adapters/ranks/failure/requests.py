"""Requests to the store on another thread: a store that is stopped never answers."""

import threading
from collections.abc import Callable
from queue import Empty, SimpleQueue
from typing import Generic, TypeVar

from attrs import frozen

_T = TypeVar("_T")


def within(seconds: float, call: Callable[[], _T]) -> _T | None:
    """Returns what `call` returns; None if it fails or takes longer: a store may be stopped.

    Example:
        >>> import time
        >>> within(1.0, lambda: 3), within(0.01, lambda: time.sleep(0.1))
        (3, None)
    """
    return Request.of(call).answer(seconds)


@frozen
class Request(Generic[_T]):
    """A call on another thread, which may never return."""

    _answer: "SimpleQueue[_T | None]"

    @classmethod
    def of(cls, call: Callable[[], _T]) -> "Request[_T]":
        """Starts the call."""
        answer: SimpleQueue[_T | None] = SimpleQueue()

        def run() -> None:
            try:
                answer.put(call())
            except (RuntimeError, OSError):  # torch's for a lost store; or no file is free
                answer.put(None)

        threading.Thread(target=run, name="shardcore-store", daemon=True).start()
        return cls(answer)

    def answer(self, seconds: float) -> _T | None:
        """Returns what the call returns; None if it fails, or has not returned after `seconds`."""
        try:
            return self._answer.get(timeout=seconds)
        except Empty:
            return None
