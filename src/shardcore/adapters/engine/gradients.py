"""Gradients, which are reduced together or brought into the layout of their variable."""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from shardcore.adapters.engine.engine import Engine
from shardcore.adapters.engine.moves.redistribution import in_layout
from shardcore.adapters.engine.tensor import ShardedTensor
from shardcore.adapters.gradient_buckets import Buckets
from shardcore.adapters.torch_compat import collectives
from shardcore.domain.layout import Layout
from shardcore.domain.spec import DimSpec, entry_axes


def start(gradients: Sequence[Any]) -> Callable[[], Sequence[Any]]:
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
            size = gradient.part.numel() * gradient.part.element_size()
            waiting.add(parameter, (have.partial, gradient.dtype), size, len(have.partial))
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
