"""Gradients of slices, which are reduced together or brought into their variable's layout."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from shardcore.adapters.gradient_buckets import Buckets
from shardcore.adapters.slices.moves import AllReduce
from shardcore.adapters.slices.tensor import Slice, in_layout
from shardcore.domain.layout import Layout
from shardcore.ports.world import World


def buckets(world: World) -> Buckets:
    """The buckets of the gradients over one mesh."""
    return Buckets(partial(_start, world))


def _start(world: World, gradients: Sequence[Any]) -> Callable[[], Sequence[Slice]]:
    """Start to sum gradients that are pending over the same axes."""
    flat = torch.cat([each.part.reshape(-1) for each in gradients])
    reduction = AllReduce.start(flat, gradients[0].mesh_layout.partial, world)

    def wait() -> Sequence[Slice]:
        parts = torch.split(reduction.wait(), [each.part.numel() for each in gradients])
        return [_summed(each, part) for each, part in zip(gradients, parts, strict=True)]

    return wait


def _summed(gradient: Slice, part: torch.Tensor) -> Slice:
    layout = Layout(gradient.world.mesh, gradient.mesh_layout.spec)
    summed = part.reshape(gradient.part.shape)
    return Slice(summed, layout, tuple(gradient.shape), gradient.world)


def is_summed_whole(gradient: Slice, target: Layout) -> bool:
    """Whether `gradient` has nothing but a pending sum between it and `target`."""
    layout = gradient.mesh_layout
    return (
        gradient.is_pending
        and {op for _, op in layout.partial} == {"sum"}
        and layout.spec == target.spec
    )


def bring(parameter: torch.Tensor, layout: Layout, waiting: Buckets) -> None:
    """Bring the gradient of `parameter` into `layout`, by the end of the backward pass."""
    gradient = parameter.grad
    if not isinstance(gradient, Slice):
        return
    with torch.no_grad():
        if is_summed_whole(gradient, layout):
            partial, part = gradient.mesh_layout.partial, gradient.part
            size = part.numel() * part.element_size()
            waiting.add(parameter, (partial, gradient.dtype), size, len(partial))
        else:
            parameter.grad = in_layout(gradient, layout)
