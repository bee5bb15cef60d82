"""Differentiable functions between plain and sharded tensors.

Their backward passes are differentiable too, for the gradient of a gradient.
"""

from collections.abc import Callable
from typing import Any

import torch

from shardcore.adapters.engine import redistributed
from shardcore.adapters.engine.engine import Engine
from shardcore.adapters.engine.redistribution import full, in_layout, local_shard
from shardcore.adapters.engine.tensor import ShardedTensor
from shardcore.adapters.engine.writes import refresh
from shardcore.domain.layouts.layout import Layout


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
    return redistributed.clone_if_cached(tensor, value)
