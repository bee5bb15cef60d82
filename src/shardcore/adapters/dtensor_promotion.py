"""On which threads plain tensors count as replicated, and which threads start collectives."""

import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch

from shardcore.adapters import torch_compat
from shardcore.domain.errors import StrategyError


class _Thread(threading.local):
    """What one thread is in. torch keeps the promotion by thread."""

    promotions = 0
    scopes = 0
    before = False


_here = _Thread()


@contextmanager
def promotion(visiting: bool = False) -> Iterator[None]:
    """Promote plain tensors to replicated ones on this thread. It nests, in any order of leaving.

    The backward pass runs on this thread: that of CUDA tensors otherwise runs on threads of its
    own, which no scope is entered on.

    Args:
        visiting: Whether this thread only computes: a collective that it starts raises, unless it
            may start some anyway.
    """
    before = torch_compat.set_promotion(True)
    if not _here.promotions:
        _here.before = before
    _here.promotions += 1
    _here.scopes += not visiting
    try:
        with torch.autograd.set_multithreading_enabled(False), _alone():
            yield
    finally:
        _here.scopes -= not visiting
        _here.promotions -= 1
        if not _here.promotions:
            torch_compat.set_promotion(_here.before)


def _alone() -> AbstractContextManager[Any]:
    """A thread that visits computes while no other is below a handler of the dispatcher."""
    return nullcontext() if _may_communicate() else torch_compat.ONE_AT_A_TIME


def _may_communicate() -> bool:
    return _here.scopes > 0 or threading.current_thread() is threading.main_thread()


def check_thread() -> None:
    """Refuse a collective on a thread whose order among the others the ranks do not agree on.

    Raises:
        StrategyError: If this is neither the main thread nor in the scope of a distribution.
    """
    if _may_communicate():
        return
    raise StrategyError(
        f"Thread {threading.current_thread().name!r} came to a collective on a sharded tensor: it "
        "would meet those of the main thread in another order on each rank. Do this on the main "
        "thread (for a callback: set `async_safe = False`); or, if the main thread waits "
        "meanwhile, inside `with distribution.scope():` on this thread."
    )


EVERY_THREAD = torch_compat.EveryThread(
    around_backward=lambda: promotion(visiting=True),
    before_collective=check_thread,
    keeps_promotion=lambda: _here.promotions > 0,
)
