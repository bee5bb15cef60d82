"""Gradients: all-reduced in buckets, or redistributed into the layout of their variable."""

from collections.abc import Callable, Hashable, Sequence
from functools import lru_cache
from typing import Any

import attrs
import torch

from shardcore.adapters import torch_private
from shardcore.adapters.capture.recorder import recording
from shardcore.adapters.engine.engine import Engine
from shardcore.adapters.engine.moves import steps
from shardcore.adapters.engine.moves.redistribution import in_layout
from shardcore.adapters.engine.tensor import ShardedTensor
from shardcore.adapters.job.threads import check_thread
from shardcore.adapters.torch_private import collectives
from shardcore.domain.layout import Layout
from shardcore.domain.spec import DimSpec, entry_axes
from shardcore.domain.steps.gradient_buckets import BUCKET_BYTES
from shardcore.ports.measurement.trace_context import gradients_apart_scope, reduction_scope

GRADIENTS = "all_reduce of gradients"


@attrs.define
class Buckets:
    """Buckets of partial gradients of one backward pass.

    A full bucket is all-reduced while the pass goes on. The others are all-reduced at its end, and
    then all are waited for. The order is that of the pass, which is the same on all ranks.
    """

    size: int = BUCKET_BYTES  # the bytes of a full bucket
    _open: dict[Hashable, list[torch.Tensor]] = attrs.field(factory=dict, init=False)
    _bytes: dict[Hashable, int] = attrs.field(factory=dict, init=False)
    _sent: list[Callable[[], None]] = attrs.field(factory=list, init=False)
    _pass: int = attrs.field(default=-1, init=False)

    def add(self, parameter: torch.Tensor, gradient: ShardedTensor) -> None:
        """Reduces `gradient`, that of `parameter`, by the end of the backward pass."""
        check_thread()
        if self._pass != torch_private.backward_pass():
            # A pass that failed has left its gradients behind.
            self._open, self._bytes, self._sent = {}, {}, []
            self._pass = torch_private.backward_pass()
            torch_private.after_backward(self._finish)
        pending = gradient.form.layout.partial
        alike = pending, gradient.dtype
        self._open.setdefault(alike, []).append(parameter)
        self._bytes[alike] = self._bytes.get(alike, 0) + gradient.part.nbytes
        # A captured step forms its own buckets: it knows all gradients. Sums over several axes
        # would not be merged there: the second reduction of each reads the first.
        apart = (len(pending) == 1 and recording() is not None) or gradients_apart_scope.now()
        if self._bytes[alike] >= self.size or apart:
            self._send(alike)

    def _send(self, alike: Hashable) -> None:
        # A hook of the user may have dropped a gradient meanwhile.
        parameters = [each for each in self._open.pop(alike) if each.grad is not None]
        del self._bytes[alike]
        with reduction_scope(parameters):
            wait = _start([each.grad for each in parameters])

        def receive() -> None:
            with reduction_scope(parameters):
                gradients = wait()
            for parameter, gradient in zip(parameters, gradients, strict=True):
                parameter.grad = gradient

        self._sent.append(receive)

    def _finish(self) -> None:
        """Reduces the other gradients; called at the end of the backward pass."""
        for alike in list(self._open):
            self._send(alike)
        sent, self._sent = self._sent, []
        for receive in sent:
            receive()


def _start(gradients: Sequence[Any]) -> Callable[[], Sequence[Any]]:
    """Starts the all-reduce of gradients that are partial over the same axes.

    A single one is sent without a bucket: a captured step forms buckets of these. A gradient that a
    hook of the user has changed meanwhile is reduced already.
    """
    sharded = (each for each in gradients if isinstance(each, ShardedTensor))
    pending = [each for each in sharded if each.form.is_pending]
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
        summed = steps.wait(started, GRADIENTS)
        for group in rest:
            summed = steps.wait(collectives.all_reduce(summed, "sum", group), GRADIENTS)
        found = torch.split(summed, [part.numel() for part in parts]) if parts[1:] else [summed]
        done = {}
        for each, values in zip(pending, found, strict=True):
            shape, form = each.part.shape, each.form
            part = values if values.shape == shape else values.reshape(shape)
            done[id(each)] = engine.sharded(part, form.layout.reduced, form.shape)
        return [done.get(id(each), each) for each in gradients]

    return wait


def bring(parameter: torch.Tensor, layout: Layout, waiting: Buckets) -> None:
    """Redistributes the gradient of `parameter` into `layout`, by the end of the backward pass."""
    gradient: Any = parameter.grad
    if not isinstance(gradient, ShardedTensor):
        return
    with torch.no_grad():
        gradient = in_layout(gradient, _cut(gradient.form.layout, layout))
        have = _as_if(layout, gradient.form.layout)
        if have != gradient.form.layout:
            gradient = gradient.engine.sharded(gradient.part, have, gradient.form.shape)
        parameter.grad = gradient
        if {op for _, op in have.partial} == {"sum"} and have.reduced == layout:
            waiting.add(parameter, gradient)
        else:
            parameter.grad = in_layout(gradient, layout)


@lru_cache(maxsize=4096)
def _as_if(layout: Layout, have: Layout) -> Layout:
    """Returns `layout`, or `have` if they differ in more than axes of one rank and partial sums.

    The partial sums are those of `have`.
    """
    single = [axis for axis in layout.mesh.axis_names if layout.mesh.axis_size(axis) == 1]
    if have == layout or have.reduced.without(*single) != layout.without(*single):
        return have
    pending = tuple(each for each in have.partial if each[0] not in single)
    return Layout(layout.mesh, layout.spec, pending, layout.blocks)


@lru_cache(maxsize=4096)
def _cut(layout: Layout, target: Layout) -> Layout:
    """Returns `layout` split like `target` by its replicated axes, to sum fewer bytes."""
    pending = [axis for axis, _ in layout.partial]
    if layout.blocks != target.blocks or not layout.reduced.is_replicated:
        return layout
    if any(_is_nested(entry, pending) for entry in target.spec):
        return layout
    return Layout(layout.mesh, target.without(*pending).spec, layout.partial)


def _is_nested(entry: DimSpec, pending: Sequence[str]) -> bool:
    """Returns whether a pending axis splits a dim that another axis splits further."""
    last = [axis in pending for axis in entry_axes(entry)]
    return last != sorted(last)
