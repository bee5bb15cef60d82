"""On which threads plain tensors count as replicated."""

import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch

from shardcore.adapters import threads
from shardcore.adapters.dtensor_gathered import GATHERED
from shardcore.adapters.torch_compat import dtensor as dtensor_compat


class _Thread(threading.local):
    """What one thread is in. torch keeps the promotion by thread."""

    promotions = 0
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
    before = dtensor_compat.set_promotion(True)
    if not _here.promotions:
        _here.before = before
    _here.promotions += 1
    order = nullcontext() if visiting else threads.communicating()
    try:
        with order, torch.autograd.set_multithreading_enabled(False), _alone():
            yield
    finally:
        _here.promotions -= 1
        if not visiting:
            GATHERED.clear()
        if not _here.promotions:
            dtensor_compat.set_promotion(_here.before)


def _alone() -> AbstractContextManager[Any]:
    """A thread that visits computes while no other is below a handler of the dispatcher."""
    return nullcontext() if threads.may_communicate() else dtensor_compat.ONE_AT_A_TIME


EVERY_THREAD = dtensor_compat.EveryThread(
    around_backward=lambda: promotion(visiting=True),
    before_collective=threads.check_thread,
    keeps_promotion=lambda: _here.promotions > 0,
)
