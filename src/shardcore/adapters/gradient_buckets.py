"""Gradients that wait for each other, and are reduced together while the backward pass goes on.

For every library of sharded tensors: it says how gradients that are alike are reduced in one move.
"""

from collections.abc import Callable, Hashable, Sequence
from typing import Any

import attrs
import torch

from shardcore.adapters import torch_compat
from shardcore.adapters.capture.recorder import recording
from shardcore.adapters.threads import check_thread
from shardcore.ports.whereabouts import reducing

# As `DistributedDataParallel` has it: large enough that the start of a collective is no matter.
BUCKET_BYTES = 25 * 1024 * 1024

# Starts to reduce gradients that are alike; what it gives waits for them.
Start = Callable[[Sequence[Any]], Callable[[], Sequence[Any]]]


@attrs.define
class Buckets:
    """The gradients of one backward pass that are pending sums of variables stored without one.

    A bucket is sent when it is full, while the pass goes on; what is left is sent at its end, and
    then all of them are waited for. The order is that of the pass, which is the same on all ranks.

    Args:
        start: Starts to reduce the gradients of a bucket.
        size: The bytes that a bucket holds before it is sent.
    """

    start: Start
    size: int = BUCKET_BYTES
    _open: dict[Hashable, list[torch.Tensor]] = attrs.field(factory=dict, init=False)
    _bytes: dict[Hashable, int] = attrs.field(factory=dict, init=False)
    _sent: list[Callable[[], None]] = attrs.field(factory=list, init=False)
    _pass: int = attrs.field(default=-1, init=False)

    def add(self, parameter: torch.Tensor, alike: Hashable, size: int, moves: int) -> None:
        """Reduce the gradient of `parameter` by the end of the backward pass.

        Args:
            parameter: Its gradient is there, and pending.
            alike: What gradients share that are reduced in one move.
            size: The bytes that this rank sends of it.
            moves: How many reductions it takes, one after the other: one for each axis.
        """
        check_thread()
        if self._pass != torch_compat.backward_pass():
            # What a pass that failed has left behind is nobody's.
            self._open, self._bytes, self._sent = {}, {}, []
            self._pass = torch_compat.backward_pass()
            torch_compat.after_backward(self._finish)
        self._open.setdefault(alike, []).append(parameter)
        self._bytes[alike] = self._bytes.get(alike, 0) + size
        # A captured step makes buckets of its own: it knows all that comes. Sums over several axes
        # would not meet there: the second of each reads what the first has made.
        if self._bytes[alike] >= self.size or (moves == 1 and recording() is not None):
            self._send(alike)

    def _send(self, alike: Hashable) -> None:
        # A hook of the user's may have dropped a gradient meanwhile.
        parameters = [each for each in self._open.pop(alike) if each.grad is not None]
        del self._bytes[alike]
        with reducing(parameters):
            wait = self.start([each.grad for each in parameters])

        def receive() -> None:
            with reducing(parameters):
                gradients = wait()
            for parameter, gradient in zip(parameters, gradients, strict=True):
                parameter.grad = gradient

        self._sent.append(receive)

    def _finish(self) -> None:
        """Called when the backward pass is through."""
        for alike in list(self._open):
            self._send(alike)
        sent, self._sent = self._sent, []
        for receive in sent:
            receive()
