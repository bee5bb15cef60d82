"""Brings a tensor from one layout to another, by slices and collectives along mesh axes."""

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import attrs
import torch
import torch.distributed as dist

from shardcore.adapters.engine import elsewhere
from shardcore.adapters.engine.engine import Engine
from shardcore.adapters.engine.tensor import Form, ShardedTensor, contiguous_strides
from shardcore.adapters.threads import check_thread
from shardcore.adapters.torch_compat import collectives
from shardcore.domain.layout import Layout, PartialAxes
from shardcore.domain.placements import Partial
from shardcore.domain.redistribution import Step, plan
from shardcore.ports.whereabouts import Move, moving

_SUM = "sum"
# What changes nothing; a mean or a maximum of equal values is that value.
_NEUTRAL = {"sum": 0, "product": 1}


@attrs.frozen(eq=False)
class _Stage:
    """Steps on a tensor that has a dim of its own for the stretches of each dim.

    Args:
        shape: The shape of the local shard before.
        steps: The steps.
    """

    shape: tuple[int, ...]
    steps: tuple[Step, ...]


@attrs.frozen(eq=False)
class Redistribution:
    """How a tensor of one form comes to another layout.

    Args:
        form: The form that the tensor has.
        target: The layout that it gets. It may be partial where `form` is not: then the first
            rank of an axis that sums has the values, and the others zeros.
        stages: The steps.
        shape: The shape of the local shard then.
        fill: What this rank has for all values, if it is one of those others.
        order: The dims of the tensor, outermost in memory first, where the steps are those of the
            tensor with its dims in that order.
    """

    form: Form
    target: Layout
    stages: tuple[_Stage, ...]
    shape: tuple[int, ...]
    fill: int | None
    order: tuple[int, ...] | None = None

    @classmethod
    def to(cls, form: Form, target: Layout, engine: Engine) -> "Redistribution | None":
        """The redistribution to `target`, None where the tensor is there already."""
        target = target.normalized(form.shape)
        if target == form.layout:
            return None
        have = form.layout.placement
        new = [axis for axis, op in target.partial if have(axis) != Partial(op)]
        kept = tuple(each for each in target.partial if each[0] not in new)
        reduced = Layout(target.mesh, target.spec, kept, target.blocks)
        world = engine.world
        at = dict(zip(world.mesh.axis_names, world.mesh.coordinate(world.position), strict=True))
        others = [op for axis, op in target.partial if axis in new and at[axis]]
        return cls(
            form,
            target,
            _stages(form, reduced, engine),
            target.local_shape(form.shape, world.position),
            next((_NEUTRAL[op] for op in others if op in _NEUTRAL), None),
        )

    @classmethod
    def of_weight(cls, form: Form, target: Layout, engine: Engine) -> "Redistribution | None":
        """The redistribution of a weight, which moves as the variable is in memory.

        A kernel and the same kernel transposed, as a backward pass reads it, are gathered once.
        """
        order = tuple(sorted(range(form.ndim), key=lambda dim: (-form.strides[dim], dim)))
        shape = tuple(form.shape[dim] for dim in order)
        strides = tuple(form.strides[dim] for dim in order)
        if form.is_contiguous or strides != contiguous_strides(shape):
            return cls.to(form, target, engine)
        own = engine.evolved(
            form, shape=shape, strides=strides, layout=_permuted(form.layout, order)
        )
        found = cls.to(own, _permuted(target, order), engine)
        return None if found is None else attrs.evolve(found, order=order)

    def run(self, part: torch.Tensor, engine: Engine) -> torch.Tensor:
        """The local shard in the new layout. `part` stays as it is. All ranks call it together."""
        if any(step.kind != "slice" for stage in self.stages for step in stage.steps):
            check_thread()
        with moving(Move(part, self.form.shape, self.form.layout, self.target)):
            part = self.as_in_memory(part)
            for stage in self.stages:
                part = part.reshape(stage.shape)
                for step in stage.steps:
                    part = _STEPS[step.kind](part, step, engine)
        part = self.as_asked(part.reshape(self.shape))
        return part if self.fill is None else torch.full_like(part, self.fill)

    def as_in_memory(self, tensor: torch.Tensor) -> torch.Tensor:
        """`tensor`, its dims in the order of the steps."""
        return tensor if self.order is None else tensor.permute(self.order)

    def as_asked(self, tensor: torch.Tensor) -> torch.Tensor:
        """`tensor`, its dims in the order of the steps, in the order that it had before."""
        if self.order is None:
            return tensor
        return tensor.permute(sorted(range(tensor.ndim), key=self.order.__getitem__))


def _permuted(layout: Layout, order: tuple[int, ...]) -> Layout:
    spec = tuple(layout.spec[dim] for dim in order)
    return Layout(layout.mesh, spec, layout.partial, (layout.blocks[dim] for dim in order))


def _stages(form: Form, target: Layout, engine: Engine) -> tuple[_Stage, ...]:
    """The steps to `target`: in one stage, where the stretches of both are dims of one shape."""
    source, shape = form.layout, form.shape
    counts = tuple(map(max, source.stretches, target.stretches))
    layouts = [source, target]
    if not all(each.has_stretches(shape, counts) for each in layouts):
        pairs = zip(source.stretches, target.stretches, strict=True)
        differ = [dim for dim, (before, after) in enumerate(pairs) if before != after]
        axes = [axis for dim in differ for axis in source.dim_axes(dim)]
        layouts = [source, source.without(*axes), target]
    stages = []
    for before, after in pairwise(layouts):
        common = tuple(map(max, before.stretches, after.stretches))
        sizes, first = before.without_stretches(shape, common)
        _, second = after.without_stretches(shape, common)
        steps = plan(first, second, sizes, form.dtype.itemsize, engine.costs)
        stages.append(_Stage(first.local_shape(sizes, engine.world.position), steps))
    return tuple(stages)


def in_layout(tensor: Any, layout: Layout, copies: bool = False) -> Any:
    """`tensor`, a sharded one, in another layout.

    Args:
        tensor: It.
        layout: The layout.
        copies: Whether it gets memory of its own, to be written into, where it is kept elsewhere
            or pending.
    """
    engine = tensor.engine
    redistribution = Redistribution.to(tensor.form, layout, engine)
    if redistribution is None:
        return tensor
    known = None if layout.partial else elsewhere.find(tensor)
    if known is not None:
        same = in_layout(known.tensor, layout, copies)
        if copies and same is known.tensor:
            return engine.wrap(same.part.clone(), same.form)
        return engine.wrap(same.part, same.form, same.memory)
    part = redistribution.run(tensor.part, engine)
    # The rank that has the values of a new sum has those of `tensor`, and the others have not.
    if copies and layout.partial and part.data_ptr() == tensor.part.data_ptr():
        part = part.clone()
    found = engine.sharded(part, redistribution.target, tensor.form.shape)
    elsewhere.note(tensor, found)
    return found


def full(tensor: Any) -> torch.Tensor:
    """The full tensor as a plain one; it may share the memory of `tensor`."""
    part: torch.Tensor = in_layout(
        tensor, Layout.replicated(tensor.engine.world.mesh, tensor.ndim)
    ).part
    return part


def reduced(tensor: Any) -> Any:
    """`tensor` with its pending reductions done; a plain one as it is."""
    if not isinstance(tensor, ShardedTensor):
        return tensor
    return in_layout(tensor, tensor.form.layout.reduced)


def local_shard(value: torch.Tensor, layout: Layout, engine: Engine) -> torch.Tensor:
    """This rank's shard of the plain `value`, sharing its memory if it can."""
    shape, rank = tuple(value.shape), engine.world.position
    sizes, plain = layout.without_stretches(shape)
    if sizes == shape:
        return value[layout.slices(shape, rank)]
    part = value.reshape(sizes)[plain.slices(sizes, rank)]
    return part.reshape(layout.local_shape(shape, rank))


@attrs.frozen
class AllReduce:
    """A sum over some mesh axes that is on its way.

    Args:
        started: What becomes the sum over the first axis.
        rest: The other axes.
        engine: Has the process groups.
    """

    started: torch.Tensor
    rest: tuple[str, ...]
    engine: Engine

    @classmethod
    def start(cls, value: torch.Tensor, partial: PartialAxes, engine: Engine) -> "AllReduce":
        """Start to sum `value` over the axes that are `partial`."""
        axes = [axis for axis, _ in partial if engine.world.mesh.axis_size(axis) > 1]
        started = collectives.all_reduce(value, _SUM, engine.groups[axes[0]])
        return cls(started, tuple(axes[1:]), engine)

    def wait(self) -> torch.Tensor:
        """The sum."""
        value = collectives.wait(self.started)
        for axis in self.rest:
            group = self.engine.groups[axis]
            value = collectives.wait(collectives.all_reduce(value, _SUM, group))
        return value


def _slice(part: torch.Tensor, step: Step, engine: Engine) -> torch.Tensor:
    if step.source_dim is not None or step.op is not None:  # an axis of one rank: it has all
        return part
    return part[step.part(engine.world.position, engine.world.position)].clone()


def _all_gather(part: torch.Tensor, step: Step, engine: Engine) -> torch.Tensor:
    """Uneven shards are each sent in a buffer of the size of the largest."""
    assert step.source_dim is not None
    peers = _peers(step, engine)
    shapes = [step.source.local_shape(step.shape, peer) for peer in peers]
    sizes = [math.prod(shape) for shape in shapes]
    buffer = _padded(part, max(sizes))
    buffers = collectives.wait(collectives.all_gather(buffer, _group(step, engine)))
    even = len(set(shapes)) == 1 and math.prod(shapes[0][: step.source_dim]) == 1
    if even and _is_sorted(peers):
        dims = list(shapes[0])
        dims[step.source_dim] *= len(shapes)
        return buffers.reshape(dims)
    chunks = [
        each[:size].reshape(shape)
        for each, size, shape in zip(buffers.chunk(len(shapes)), sizes, shapes, strict=True)
    ]
    return torch.cat(_in_axis_order(chunks, peers), dim=step.source_dim)


def _is_sorted(peers: Sequence[int]) -> bool:
    return list(peers) == sorted(peers)


def _in_axis_order(chunks: Sequence[torch.Tensor], peers: Sequence[int]) -> list[torch.Tensor]:
    """`chunks`, one of each of `peers`, in the order of their places along the axis."""
    return [chunk for _, chunk in sorted(zip(peers, chunks, strict=True), key=lambda pair: pair[0])]


def _padded(part: torch.Tensor, size: int) -> torch.Tensor:
    """The elements of `part`, and zeros up to `size` of them."""
    flat = part.reshape(-1)
    if flat.numel() == size:
        return flat
    return torch.nn.functional.pad(flat, (0, size - flat.numel()))


def _all_reduce(part: torch.Tensor, step: Step, engine: Engine) -> torch.Tensor:
    assert step.op is not None
    reduced = collectives.wait(collectives.all_reduce(part, _sent(step), _group(step, engine)))
    return reduced / step.source.mesh.axis_size(step.axis) if step.op == "avg" else reduced


def _all_to_all(part: torch.Tensor, step: Step, engine: Engine) -> torch.Tensor:
    peers, rank = _peers(step, engine), engine.world.position
    sent = [part[step.part(rank, peer)] for peer in peers]
    shapes = [_shape(step.part(peer, rank)) for peer in peers]
    sizes = [math.prod(shape) for shape in shapes]
    received = collectives.all_to_all(
        torch.cat([each.reshape(-1) for each in sent]),
        sizes,
        [each.numel() for each in sent],
        _group(step, engine),
    )
    pieces = torch.split(collectives.wait(received), sizes)
    assert step.source_dim is not None
    chunks = [piece.reshape(shape) for piece, shape in zip(pieces, shapes, strict=True)]
    return torch.cat(_in_axis_order(chunks, peers), dim=step.source_dim)


def _reduce_scatter(part: torch.Tensor, step: Step, engine: Engine) -> torch.Tensor:
    """Uneven shards are each sent in a buffer of the size of the largest."""
    assert step.op is not None
    assert step.target_dim is not None
    peers, rank = _peers(step, engine), engine.world.position
    places = [step.part(rank, peer) for peer in peers]
    shapes = [_shape(place) for place in places]
    sizes = [math.prod(shape) for shape in shapes]
    even = len(set(shapes)) == 1 and math.prod(part.shape[: step.target_dim]) == 1
    if even and _is_sorted(peers):
        buffer = part.reshape(-1)
    else:
        size = max(sizes)
        buffer = torch.cat([_padded(part[place], size) for place in places])
    own = collectives.wait(collectives.reduce_scatter(buffer, _sent(step), _group(step, engine)))
    shape = _shape(step.part(rank, rank))
    reduced = own[: math.prod(shape)].reshape(shape)
    return reduced / len(peers) if step.op == "avg" else reduced


_STEPS = {
    "slice": _slice,
    "all_gather": _all_gather,
    "all_reduce": _all_reduce,
    "all_to_all": _all_to_all,
    "reduce_scatter": _reduce_scatter,
}


def _sent(step: Step) -> str:
    """What the collective does: gloo has no average."""
    assert step.op is not None
    return _SUM if step.op == "avg" else step.op


def _shape(part: tuple[slice, ...]) -> tuple[int, ...]:
    return tuple(each.stop - each.start for each in part)


def _peers(step: Step, engine: Engine) -> tuple[int, ...]:
    """The mesh ranks along the axis, in the order of their process group: by process."""
    world = engine.world
    peers = world.mesh.axis_group(step.axis, world.position)
    return tuple(sorted(peers, key=world.processes.__getitem__))


def _group(step: Step, engine: Engine) -> dist.ProcessGroup:
    return engine.groups[step.axis]
