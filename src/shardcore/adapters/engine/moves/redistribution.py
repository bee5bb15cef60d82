"""Redistributes tensors by slices and collectives along mesh axes."""

from typing import Any

import attrs
import torch

from shardcore.adapters.engine import redistributed
from shardcore.adapters.engine.engine import Engine
from shardcore.adapters.engine.moves.steps import STEPS
from shardcore.adapters.engine.tensor import Form, ShardedTensor, contiguous_strides
from shardcore.adapters.job.threads import check_thread
from shardcore.domain.layout import Layout
from shardcore.domain.placements import Partial
from shardcore.domain.redistribution.exchange import Exchange
from shardcore.domain.redistribution.plan import Step
from shardcore.domain.redistribution.segments import without_segments
from shardcore.domain.redistribution.stages import stages
from shardcore.ports.measurement.trace_context import Move, redistribution_scope

# The neutral values; a mean or a maximum of equal values is that value.
_NEUTRAL = {"sum": 0, "product": 1}


# The shape of the local shard before steps, with a separate dim for the segments of each dim.
_Stage = tuple[tuple[int, ...], tuple[Step | Exchange, ...]]


@attrs.frozen(eq=False)
class Redistribution:
    """The redistribution of tensors of one form to another layout."""

    form: Form
    # The layout that it gets. It may be partial if `form` is not: the first rank of a summed axis
    # then has the values, and the others zeros.
    target: Layout
    stages: tuple[_Stage, ...]
    shape: tuple[int, ...]  # the shape of the local shard after
    fill: int | None  # the neutral value, if this rank is one of those others
    # The dims of the tensor, outermost in memory first, if the steps apply to the tensor with its
    # dims in that order.
    order: tuple[int, ...] | None = None
    # The dims along which the values are equal, and which get sharded: the steps move them once.
    repeats: tuple[int, ...] = ()

    @classmethod
    def to(cls, form: Form, target: Layout, engine: Engine) -> "Redistribution | None":
        """Returns the redistribution to `target`, None if the tensor is in it already."""
        target = target.normalized(form.shape)
        if target == form.layout:
            return None
        repeats = _repeats(form, target)
        if repeats:
            return cls._of_repeated(form, target, repeats, engine)
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
    def _of_repeated(
        cls, form: Form, target: Layout, repeats: tuple[int, ...], engine: Engine
    ) -> "Redistribution":
        """Returns the redistribution of one of equal parts, which each rank repeats."""
        shape = tuple(1 if dim in repeats else size for dim, size in enumerate(form.shape))
        once = engine.form(shape, form.layout, form.dtype, form.device)
        axes = [axis for dim in repeats for axis in target.dim_axes(dim)]
        found = cls.to(once, target.without(*axes), engine)
        local = target.local_shape(form.shape, engine.world.position)
        stages = () if found is None else found.stages
        return cls(form, target, stages, local, None, repeats=repeats)

    @classmethod
    def of_weight(cls, form: Form, target: Layout, engine: Engine) -> "Redistribution | None":
        """Returns the redistribution of a weight, with dims in the order of the variable's memory.

        A kernel and its transpose, which a backward pass reads, are all-gathered once.
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
        """Returns the local shard in the new layout. All ranks call it together."""
        if any(step.kind != "slice" for _, steps in self.stages for step in steps):
            check_thread()
        with redistribution_scope(Move(part, self.form.shape, self.form.layout, self.target)):
            part = self.as_in_memory(part)
            for dim in self.repeats:
                part = part.narrow(dim, 0, 1)
            for shape, steps in self.stages:
                part = part.reshape(shape)
                for step in steps:
                    part = STEPS[step.kind](part, step, engine)
        if self.repeats:
            once = (1 if dim in self.repeats else size for dim, size in enumerate(self.shape))
            return part.reshape(*once).expand(self.shape)
        part = self.as_asked(part.reshape(self.shape))
        return part if self.fill is None else torch.full_like(part, self.fill)

    def as_in_memory(self, tensor: torch.Tensor) -> torch.Tensor:
        """Returns `tensor` with its dims in the order of the steps."""
        return tensor if self.order is None else tensor.permute(self.order)

    def as_asked(self, tensor: torch.Tensor) -> torch.Tensor:
        """Returns `tensor`, whose dims are in the order of the steps, with its original order."""
        if self.order is None:
            return tensor
        return tensor.permute(sorted(range(tensor.ndim), key=self.order.__getitem__))


def _repeats(form: Form, target: Layout) -> tuple[int, ...]:
    """Returns the dims of equal values that `target` shards by axes which shard other dims now."""
    if form.weight or form.layout.partial or target.partial:
        return ()
    sharded = {axis for dim in range(form.ndim) for axis in form.layout.dim_axes(dim)}
    return tuple(
        dim
        for dim in form.repeats
        if not form.layout.dim_axes(dim) and not sharded.isdisjoint(target.dim_axes(dim))
    )


def _permuted(layout: Layout, order: tuple[int, ...]) -> Layout:
    spec = tuple(layout.spec[dim] for dim in order)
    return Layout(layout.mesh, spec, layout.partial, (layout.blocks[dim] for dim in order))


def _stages(form: Form, target: Layout, engine: Engine) -> tuple[_Stage, ...]:
    """Returns the stages to `target`, each with the shape of the local shard before."""
    found = stages(form.layout, target, form.shape, form.dtype.itemsize, engine.costs)
    rank = engine.world.position
    return tuple((each.layout.local_shape(each.shape, rank), each.steps) for each in found)


def in_layout(tensor: ShardedTensor, layout: Layout, copies: bool = False) -> ShardedTensor:
    """Returns the sharded `tensor` in another layout.

    With `copies`, the result has separate memory, to be written into.
    """
    engine: Engine = tensor.engine
    redistribution = Redistribution.to(tensor.form, layout, engine)
    if redistribution is None:
        return tensor
    known = None if layout.partial else redistributed.find(tensor)
    if known is not None:
        same = in_layout(known.tensor, layout, copies)
        if copies and same is known.tensor:
            return engine.wrap(same.part.clone(), same.form)
        return engine.wrap(same.part, same.form, same.memory)
    part = redistribution.run(tensor.part, engine)
    # For a new partial sum, one rank has the values of `tensor`, and the others zeros.
    if copies and layout.partial and part.data_ptr() == tensor.part.data_ptr():
        part = part.clone()
    found = engine.sharded(part, redistribution.target, tensor.form.shape)
    redistributed.note(tensor, found)
    return found


def full(tensor: ShardedTensor) -> torch.Tensor:
    """Returns the full tensor as a plain one; it may share the memory of `tensor`."""
    return in_layout(tensor, Layout.replicated(tensor.engine.world.mesh, tensor.ndim)).part


def reduced(tensor: torch.Tensor) -> Any:
    """Returns `tensor` reduced; a plain one as it is."""
    if not isinstance(tensor, ShardedTensor):
        return tensor
    return in_layout(tensor, tensor.form.layout.reduced)


def local_shard(value: torch.Tensor, layout: Layout, engine: Engine) -> torch.Tensor:
    """Returns this rank's shard of the plain `value`, sharing its memory if possible."""
    shape, rank = tuple(value.shape), engine.world.position
    sizes, plain = without_segments(layout, shape)
    if sizes == shape:
        return value[layout.slices(shape, rank)]
    part = value.reshape(sizes)[plain.slices(sizes, rank)]
    return part.reshape(layout.local_shape(shape, rank))
