"""A watch over replays of CUDA graphs with collectives: NCCL's own watchdog does not see these.

Without it a rank would wait for ever for one that does not come. It ends with an error instead, as
after a collective outside a graph.
"""

import os
import sys
import threading
import time
from collections import deque
from typing import Any

import attrs
import torch

from shardcore.adapters.ranks.failure import heartbeats
from shardcore.adapters.ranks.job import process_group

_POLL_SECONDS = 1.0


@attrs.define(eq=False)
class ReplayWatch:
    """The replays of this process that the GPU has not finished.

    A thread looks at them, from the first one on. If none finishes within the timeout of
    collectives while one is pending, it ends this process.
    """

    _pending: deque[Any] = attrs.field(factory=deque, init=False)
    _device: int = attrs.field(default=0, init=False)
    _thread: threading.Thread | None = attrs.field(default=None, init=False)
    _stopped: threading.Event = attrs.field(factory=threading.Event, init=False)

    def add(self) -> None:
        """Notes a replay, which has just been started on the current stream."""
        finished = torch.cuda.Event()  # type: ignore[no-untyped-call]
        finished.record()
        self._pending.append(finished)
        if self._thread is None:
            self._device = torch.cuda.current_device()
            self._thread = threading.Thread(
                target=self._look, name="shardcore-replay-watch", daemon=True
            )
            self._thread.start()

    def stop(self) -> None:
        """Ends the thread."""
        self._stopped.set()

    def _look(self) -> None:
        torch.cuda.set_device(self._device)  # a thread begins with the first one
        limit = process_group.seconds(None)
        oldest, since = None, 0.0
        while not self._stopped.wait(_POLL_SECONDS):
            try:
                while self._pending and self._pending[0].query():
                    self._pending.popleft()
            except RuntimeError:  # an error of the GPU, which the main thread gets too
                return
            first = self._pending[0] if self._pending else None
            if first is not oldest:
                oldest, since = first, time.monotonic()
            elif first is not None and time.monotonic() - since > limit:
                _fail()


def _fail() -> None:
    """Ends this process: its main thread waits for the GPU, where no exception reaches it."""
    error = heartbeats.waited_in_graph()
    sys.excepthook(type(error), error, None)  # the failure watch tells the other ranks, and exits
    os._exit(1)
