"""Gradients: reduced together, or brought into the layout of their variable."""

from collections.abc import Callable, Hashable, Sequence
from typing import Any

import attrs
import torch

from shardcore.adapters import torch_compat
from shardcore.adapters.capture.recorder import recording
from shardcore.adapters.engine.engine import Engine
from shardcore.adapters.engine.moves.redistribution import in_layout
from shardcore.adapters.engine.tensor import ShardedTensor
from shardcore.adapters.threads import check_thread
from shardcore.adapters.torch_compat import collectives
from shardcore.domain.layout import Layout
from shardcore.domain.spec import DimSpec, entry_axes
from shardcore.ports.whereabouts import reducing

# As `DistributedDataParallel` has it: large enough that the start of a collective is no matter.
BUCKET_BYTES = 25 * 1024 * 1024


@attrs.define
class Buckets:
    """The gradients of one backward pass that are pending sums of variables stored without one.

    A bucket is sent when it is full, while the pass goes on; what is left is sent at its end, and
    then all of them are waited for. The order is that of the pass, which is the same on all ranks.

    Args:
        size: The bytes that a bucket holds before it is sent.
    """

    size: int = BUCKET_BYTES
    _open: dict[Hashable, list[torch.Tensor]] = attrs.field(factory=dict, init=False)
    _bytes: dict[Hashable, int] = attrs.field(factory=dict, init=False)
    _sent: list[Callable[[], None]] = attrs.field(factory=list, init=False)
    _pass: int = attrs.field(default=-1, init=False)

    def add(self, parameter: torch.Tensor, gradient: Any) -> None:
        """Reduce `gradient`, that of `parameter`, by the end of the backward pass."""
        check_thread()
        if self._pass != torch_compat.backward_pass():
            # A pass that failed has left its gradients behind.
            self._open, self._bytes, self._sent = {}, {}, []
            self._pass = torch_compat.backward_pass()
            torch_compat.after_backward(self._finish)
        pending, part = gradient.form.layout.partial, gradient.part
        alike = pending, gradient.dtype
        self._open.setdefault(alike, []).append(parameter)
        self._bytes[alike] = self._bytes.get(alike, 0) + part.numel() * part.element_size()
        # A captured step makes buckets of its own: it knows all that comes. Sums over several axes
        # would not meet there: the second of each reads what the first has made.
        of_one_axis = len(pending) == 1
        if self._bytes[alike] >= self.size or (of_one_axis and recording() is not None):
            self._send(alike)

    def _send(self, alike: Hashable) -> None:
        # A hook of the user's may have dropped a gradient meanwhile.
        parameters = [each for each in self._open.pop(alike) if each.grad is not None]
        del self._bytes[alike]
        with reducing(parameters):
            wait = _start([each.grad for each in parameters])

        def receive() -> None:
            with reducing(parameters):
                gradients = wait()
            for parameter, gradient in zip(parameters, gradients, strict=True):
                parameter.grad = gradient

        self._sent.append(receive)

    def _finish(self) -> None:
        """Called when the backward pass is finished."""
        for alike in list(self._open):
            self._send(alike)
        sent, self._sent = self._sent, []
        for receive in sent:
            receive()


def _start(gradients: Sequence[Any]) -> Callable[[], Sequence[Any]]:
    """Start to sum gradients that are pending over the same axes.

    One alone is sent as it is: a captured step makes buckets of such. One that a hook of the user's
    has changed meanwhile is summed already.
    """
    pending = [each for each in gradients if isinstance(each, ShardedTensor) and each.is_pending]
    if not pending:
        return lambda: gradients
    parts = [each.part for each in pending]
    flat = parts[0] if len(parts) == 1 else torch.cat([part.reshape(-1) for part in parts])
    engine: Engine = pending[0].engine
    partial = pending[0].form.layout.partial
    first, *rest = (
        engine.groups[axis] for axis, _ in partial if engine.world.mesh.axis_size(axis) > 1
    )
    started = collectives.all_reduce(flat, "sum", first)

    def wait() -> Sequence[Any]:
        summed = collectives.wait(started)
        for group in rest:
            summed = collectives.wait(collectives.all_reduce(summed, "sum", group))
        found = torch.split(summed, [part.numel() for part in parts]) if parts[1:] else [summed]
        done = {}
        for each, values in zip(pending, found, strict=True):
            shape, form = each.part.shape, each.form
            part = values if values.shape == shape else values.reshape(shape)
            done[id(each)] = engine.sharded(part, form.layout.reduced, form.shape)
        return [done.get(id(each), each) for each in gradients]

    return wait


def bring(parameter: torch.Tensor, layout: Layout, waiting: Buckets) -> None:
    """Bring the gradient of `parameter` into `layout`, by the end of the backward pass."""
    gradient: Any = parameter.grad
    if not isinstance(gradient, ShardedTensor):
        return
    with torch.no_grad():
        gradient = _as_if(layout, in_layout(gradient, _cut(gradient.form.layout, layout)))
        have = gradient.form.layout
        parameter.grad = gradient
        if {op for _, op in have.partial} == {"sum"} and have.reduced == layout:
            waiting.add(parameter, gradient)
        else:
            parameter.grad = in_layout(gradient, layout)


def _as_if(layout: Layout, gradient: Any) -> Any:
    """`gradient`, said to be in `layout` where it is, but for axes of one rank and pending sums."""
    have = gradient.form.layout
    single = [axis for axis in layout.mesh.axis_names if layout.mesh.axis_size(axis) == 1]
    if have == layout or have.reduced.without(*single) != layout.without(*single):
        return gradient
    pending = tuple(each for each in have.partial if each[0] not in single)
    said = Layout(layout.mesh, layout.spec, pending, layout.blocks)
    return gradient.engine.sharded(gradient.part, said, gradient.form.shape)


def _cut(layout: Layout, target: Layout) -> Layout:
    """`layout`, split as `target` is by the axes that do nothing to it: fewer bytes are summed."""
    pending = [axis for axis, _ in layout.partial]
    if layout.blocks != target.blocks or not layout.reduced.is_replicated:
        return layout
    if any(_is_nested(entry, pending) for entry in target.spec):
        return layout
    return Layout(layout.mesh, target.without(*pending).spec, layout.partial)


def _is_nested(entry: DimSpec, pending: Sequence[str]) -> bool:
    """Whether a pending axis splits a dim that another axis splits again."""
    last = [axis in pending for axis in entry_axes(entry)]
    return last != sorted(last)
