"""Autograd: differentiable redistribution, and gradients that are reduced in buckets (ADR 17).

The backward passes are differentiable too, for the gradient of a gradient.
"""

from collections.abc import Callable, Hashable, Sequence
from typing import Any

import attrs
import torch

from shardcore.adapters import torch_private
from shardcore.adapters.capture.recording.gradients import RecordedGradients
from shardcore.adapters.engine.engine import Engine
from shardcore.adapters.engine.redistribution import clone_if_cached, full, in_layout, local_shard
from shardcore.adapters.engine.tensor import ShardedTensor
from shardcore.adapters.engine.writes import refresh
from shardcore.adapters.ranks.job.threads import check_thread
from shardcore.adapters.ranks.waiting import wait
from shardcore.adapters.torch_private import collectives
from shardcore.domain.cost.gradients import BUCKET_BYTES, as_target, sharded_like
from shardcore.domain.layouts.layout import Layout
from shardcore.ports.measurement import gradients_apart_scope, reduction_scope


class _Redistribute(torch.autograd.Function):
    """Redistributes a tensor. The gradient gets the layout of the operand."""

    @staticmethod
    def forward(context: Any, tensor: torch.Tensor, layout: Layout, engine: Engine) -> Any:
        sharded = engine.adopt(tensor)
        context.source = None if sharded is None else sharded.form.layout.reduced
        if sharded is not None:
            refresh(sharded)
            copy = in_layout(sharded, layout, copies=True)
            return copy.detach() if copy is tensor else copy
        part = local_shard(tensor.detach(), layout, engine)
        copied = part.clone(memory_format=torch.contiguous_format)
        return engine.sharded(copied, layout, tuple(tensor.shape))

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> Any:
        if not isinstance(gradient, ShardedTensor):
            return gradient, None, None
        if context.source is None:
            whole = full_tensor if _is_in_graph(gradient) else full
            return whole(gradient), None, None
        return gradient_in(gradient, context.source), None, None


class _FromLocal(torch.autograd.Function):
    """Makes a sharded tensor of a local shard, which gets its shard of the gradient."""

    @staticmethod
    def forward(
        context: Any, part: torch.Tensor, layout: Layout, shape: tuple[int, ...], engine: Engine
    ) -> Any:
        context.layout, context.engine = layout.reduced, engine
        return engine.sharded(part.detach(), layout, shape)

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> Any:
        if _is_in_graph(gradient):
            sharded = redistribute(gradient, context.layout, context.engine)
            return to_local(sharded), None, None, None
        sharded = context.engine.as_sharded(gradient)
        return in_layout(sharded, context.layout).part, None, None, None


class _ToLocal(torch.autograd.Function):
    """Takes the local shard of a sharded tensor, sharing its memory."""

    @staticmethod
    def forward(context: Any, tensor: ShardedTensor, layout: Layout | None) -> Any:
        context.layout = layout or tensor.form.layout.reduced
        context.engine, context.shape = tensor.engine, tuple(tensor.shape)
        refresh(tensor)
        return tensor.part.view_as(tensor.part)

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> Any:
        return from_local(gradient, context.layout, context.shape, context.engine), None


# The stubs of torch do not type `apply`.
redistribute: Callable[..., Any] = _Redistribute.apply
from_local: Callable[..., Any] = _FromLocal.apply
_to_local: Callable[..., Any] = _ToLocal.apply


def gradient_in(gradient: ShardedTensor, layout: Layout) -> ShardedTensor:
    """Redistributes `gradient`; differentiable if it is part of a graph (`create_graph`)."""
    if not _is_in_graph(gradient):
        return in_layout(gradient, layout)
    differentiable: ShardedTensor = redistribute(gradient, layout, gradient.engine)
    return differentiable


def _is_in_graph(tensor: torch.Tensor) -> bool:
    return torch.is_grad_enabled() and tensor.requires_grad


def to_local(tensor: ShardedTensor, gradient_layout: Layout | None = None) -> torch.Tensor:
    """Takes the local shard of `tensor`, sharing its memory.

    The gradient has `gradient_layout`, by default that of `tensor`, reduced.
    """
    if _is_in_graph(tensor):
        local: torch.Tensor = _to_local(tensor, gradient_layout)
        return local
    refresh(tensor)
    return tensor.part


def full_tensor(tensor: ShardedTensor, gradient_layout: Layout | None = None) -> torch.Tensor:
    """All-gathers `tensor` as a plain one. All ranks call it together.

    The gradient has `gradient_layout`; by default all ranks have the full, equal gradient.
    """
    layout = Layout.replicated(tensor.engine.world.mesh, tensor.ndim)
    value = to_local(redistribute(tensor, layout, tensor.engine), gradient_layout)
    return clone_if_cached(tensor, value)


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
    _recorded: RecordedGradients = attrs.field(factory=RecordedGradients, init=False)
    _pass: int = attrs.field(default=-1, init=False)

    def add(self, parameter: torch.Tensor, gradient: ShardedTensor) -> None:
        """Reduces `gradient` of `parameter` by the end of the backward pass."""
        check_thread()
        if self._pass != torch_private.backward_pass():
            # A pass that failed has left its gradients behind.
            self._open, self._bytes, self._sent, self._recorded = {}, {}, [], RecordedGradients()
            self._pass = torch_private.backward_pass()
            torch_private.after_backward(self._finish)
        alike = gradient.form.layout.partial, gradient.dtype
        self._open.setdefault(alike, []).append(parameter)
        self._bytes[alike] = self._bytes.get(alike, 0) + gradient.part.nbytes
        self._recorded.add(parameter, gradient)
        if self._bytes[alike] >= self.size or gradients_apart_scope.now():
            self._send(alike)

    def _send(self, alike: Hashable) -> None:
        # A hook of the user may have dropped a gradient meanwhile.
        parameters = [
            parameter for parameter in self._open.pop(alike) if parameter.grad is not None
        ]
        del self._bytes[alike]
        bucket = self._recorded.take(parameters)
        with reduction_scope(parameters), bucket.unrecorded():
            reduced = _start([parameter.grad for parameter in parameters])

        def receive() -> None:
            with reduction_scope(parameters), bucket.unrecorded():
                results = bucket.results(reduced())
                for parameter, gradient in zip(parameters, results, strict=True):
                    parameter.grad = gradient

        self._sent.append(receive)

    def _finish(self) -> None:
        """Reduces the other gradients; called at the end of the backward pass."""
        for alike in list(self._open):
            self._send(alike)
        sent, self._sent = self._sent, []
        for receive in sent:
            receive()


def _start(gradients: Sequence[object]) -> Callable[[], Sequence[Any]]:
    """Starts the all-reduce of gradients that are partial over the same axes.

    A gradient that a hook of the user has changed meanwhile is reduced already.
    """
    sharded = (gradient for gradient in gradients if isinstance(gradient, ShardedTensor))
    pending = [gradient for gradient in sharded if gradient.form.is_pending]
    if not pending:
        return lambda: gradients
    parts = [gradient.part for gradient in pending]
    flat = parts[0] if len(parts) == 1 else torch.cat([part.reshape(-1) for part in parts])
    engine: Engine = pending[0].engine
    partial = pending[0].form.layout.partial
    first, *rest = (
        engine.groups[axis] for axis, _ in partial if engine.world.mesh.axis_size(axis) > 1
    )
    started = collectives.all_reduce(flat, "sum", first)

    def receive() -> Sequence[Any]:
        summed = wait(started, GRADIENTS)
        for group in rest:
            summed = wait(collectives.all_reduce(summed, "sum", group), GRADIENTS)
        sums = torch.split(summed, [part.numel() for part in parts]) if parts[1:] else [summed]
        done = {}
        for gradient, values in zip(pending, sums, strict=True):
            shape, form = gradient.part.shape, gradient.form
            part = values if values.shape == shape else values.reshape(shape)
            done[id(gradient)] = engine.sharded(part, form.layout.reduced, form.shape)
        return [done.get(id(gradient), gradient) for gradient in gradients]

    return receive


def reduce_gradient(parameter: torch.Tensor, layout: Layout, waiting: Buckets) -> None:
    """Redistributes the gradient of `parameter` into `layout`, by the end of the backward pass."""
    gradient: Any = parameter.grad
    if gradient is None or gradient.layout is not torch.strided:
        return
    if isinstance(parameter, ShardedTensor) and not isinstance(gradient, ShardedTensor):
        gradient = parameter.engine.as_sharded(gradient)  # torch made it by `new_zeros`: it is full
    if gradient.requires_grad:  # `backward(create_graph=True)`: it is differentiated again
        parameter.grad = gradient_in(gradient, layout)
        return
    with torch.no_grad():
        gradient = in_layout(gradient, sharded_like(gradient.form.layout, layout))
        have = as_target(gradient.form.layout, layout)
        if have != gradient.form.layout:
            gradient = gradient.engine.sharded(gradient.part, have, gradient.form.shape)
        parameter.grad = gradient
        if {op for _, op in have.partial} == {"sum"} and have.reduced == layout:
            waiting.add(parameter, gradient)
        else:
            parameter.grad = in_layout(gradient, layout)
