"""Gradients that wait for each other, and are reduced together while the backward pass goes on."""

from collections.abc import Callable
from typing import Any

import attrs
import torch

from shardcore.adapters import torch_compat
from shardcore.adapters.slices.moves import AllReduce
from shardcore.adapters.slices.tensor import Slice, in_layout
from shardcore.adapters.threads import check_thread
from shardcore.domain.layout import Layout
from shardcore.ports.world import World

# As `DistributedDataParallel` has it: large enough that the start of a collective is no matter.
BUCKET_BYTES = 25 * 1024 * 1024


@attrs.define
class Buckets:
    """The gradients of one backward pass that are pending sums of replicated variables.

    A bucket is sent when it is full, while the pass goes on; what is left is sent at its end, and
    then all of them are waited for. The order is that of the pass, which is the same on all ranks.

    Args:
        world: The mesh over the processes.
        size: The bytes that a bucket holds before it is sent.
    """

    world: World
    size: int = BUCKET_BYTES
    _open: dict[Any, list[torch.Tensor]] = attrs.field(factory=dict, init=False)
    _sent: list[Callable[[], None]] = attrs.field(factory=list, init=False)
    _pass: int = attrs.field(default=-1, init=False)

    def add(self, parameter: torch.Tensor, gradient: Slice) -> None:
        """Reduce `gradient`, which is that of `parameter`, by the end of the backward pass."""
        check_thread()
        if self._pass != torch_compat.backward_pass():
            # What a pass that failed has left behind is nobody's.
            self._open, self._sent = {}, []
            self._pass = torch_compat.backward_pass()
            torch_compat.after_backward(self._finish)
        key = gradient.mesh_layout.partial, gradient.dtype
        bucket = self._open.setdefault(key, [])
        bucket.append(parameter)
        if sum(_bytes(each) for each in bucket) >= self.size:
            self._send(key)

    def _send(self, key: Any) -> None:
        parameters = self._open.pop(key)
        gradients: list[Any] = [each.grad for each in parameters]
        flat = torch.cat([each.part.reshape(-1) for each in gradients])
        reduction = AllReduce.start(flat, key[0], self.world)

        def receive() -> None:
            parts = torch.split(reduction.wait(), [each.part.numel() for each in gradients])
            for parameter, gradient, part in zip(parameters, gradients, parts, strict=True):
                layout = Layout(self.world.mesh, gradient.mesh_layout.spec)
                summed = part.reshape(gradient.part.shape)
                parameter.grad = Slice(summed, layout, tuple(gradient.shape), self.world)

        self._sent.append(receive)

    def _finish(self) -> None:
        """Called when the backward pass is through."""
        for key in list(self._open):
            self._send(key)
        sent, self._sent = self._sent, []
        for receive in sent:
            receive()


def _bytes(parameter: torch.Tensor) -> int:
    gradient: Any = parameter.grad
    return int(gradient.part.numel() * gradient.part.element_size())


def is_summed_whole(gradient: Slice, target: Layout) -> bool:
    """Whether `gradient` has nothing but a pending sum between it and `target`."""
    layout = gradient.mesh_layout
    return (
        gradient.is_pending
        and {op for _, op in layout.partial} == {"sum"}
        and layout.spec == target.spec
    )


def bring(parameter: torch.Tensor, layout: Layout, buckets: Buckets) -> None:
    """Bring the gradient of `parameter` into `layout`, by the end of the backward pass."""
    gradient = parameter.grad
    if not isinstance(gradient, Slice):
        return
    with torch.no_grad():
        if is_summed_whole(gradient, layout):
            buckets.add(parameter, gradient)
        else:
            parameter.grad = in_layout(gradient, layout)
