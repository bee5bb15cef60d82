"""Redistributes tensors by slices and collectives, and caches copies within a step (ADR 17).

The backward pass reads the copy of an activation that the forward pass has all-gathered, and a
partial sum that several operators read is reduced once.
"""

import math
from collections.abc import Hashable, Sequence
from typing import Any

import attrs
import torch

from shardcore.adapters import torch_private
from shardcore.adapters.engine.engine import Engine
from shardcore.adapters.engine.redistribution_steps import STEPS, pad_to_size
from shardcore.adapters.engine.tensor import Form, ShardedTensor
from shardcore.adapters.ranks.job.threads import check_thread
from shardcore.adapters.ranks.waiting import wait
from shardcore.adapters.torch_private import collectives
from shardcore.domain.engine.exchange import Exchange
from shardcore.domain.engine.redistribution import Step
from shardcore.domain.engine.segments import stages, without_segments
from shardcore.domain.layouts.derived_layouts import (
    is_less_sharded,
    layout_on_first_ranks,
    newly_sharded_dims,
    with_dims,
)
from shardcore.domain.layouts.layout import Layout
from shardcore.domain.layouts.memory_order import Order, inverse, memory_order, pieces, strides_in
from shardcore.ports.measurement import Move, redistribution_scope
from shardcore.ports.world import World


@attrs.frozen(eq=False)
class Redistributed:
    """A copy of a tensor in another layout."""

    tensor: Any
    serves: bool  # whether products read it in place of the shards
    of: torch.Tensor  # the shard that was copied, kept so that no other has its id
    stamp: Hashable  # a value that changes when either is written, or the step ends


def note_copy(tensor: ShardedTensor, copy: ShardedTensor, serves: bool = False) -> None:
    """Caches `copy`, which has the values of `tensor`, unless a copy that shards less is cached.

    `UnshardedWeights` caches weights. `serves` says whether products read `copy` from now on.
    """
    known = find_copy(tensor)
    # A partial tensor would be read as its sum.
    if (
        tensor.form.weight
        or copy.form.layout.partial
        or (known is not None and is_less_sharded(tensor.form.layout, known.tensor.form.layout))
    ):
        return
    memory = tensor.memory
    if memory.redistributed is None:
        memory.redistributed = {}
    memory.redistributed[_view_key(tensor)] = Redistributed(
        copy, serves, tensor.part, _stamp(tensor, copy)
    )


def find_copy(tensor: ShardedTensor) -> Redistributed | None:
    """Looks up a copy of `tensor` in another layout; None if there is none, or it is stale."""
    known: dict[Hashable, Redistributed] | None = tensor.memory.redistributed
    copy = known.get(_view_key(tensor)) if known else None
    return copy if copy and copy.stamp == _stamp(tensor, copy.tensor) else None


def clone_if_cached(tensor: ShardedTensor, value: torch.Tensor) -> torch.Tensor:
    """Clones the full `value` of `tensor` for the user, if it is the cached copy.

    NumPy may write into it, which torch does not count; a cached copy would then be wrong.
    """
    return value if find_copy(tensor) is None else value.clone()


def _view_key(tensor: ShardedTensor) -> Hashable:
    """Identifies the elements of `tensor`: equal views have equal keys."""
    part = tensor.part
    return tensor.form, torch_private.memory_of(part), part.storage_offset(), part.stride()


def _stamp(tensor: ShardedTensor, copy: ShardedTensor) -> Hashable:
    return (
        tensor.engine.steps,
        tensor.memory.writes,
        torch_private.version_of(tensor.part),
        copy.memory.writes,
        torch_private.version_of(copy.part),
    )


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
    # The order of the dims in the steps; None for that of `form`.
    order: Order | None = None
    # The dims along which the values are equal, and which get sharded: the steps move them once.
    repeats: tuple[int, ...] = ()

    @classmethod
    def to(cls, form: Form, target: Layout, engine: Engine) -> "Redistribution | None":
        """Plans the redistribution to `target`, None if the tensor is in it already."""
        target = target.normalized(form.shape)
        if target == form.layout:
            return None
        repeats = () if form.weight else newly_sharded_dims(form.repeats, form.layout, target)
        if repeats:
            return cls._of_repeated(form, target, repeats, engine)
        rank = engine.world.position
        values, fill = layout_on_first_ranks(form.layout, target, rank)
        stages = _stages(form, values, engine)
        return cls(form, target, stages, target.local_shape(form.shape, rank), fill)

    @classmethod
    def _of_repeated(
        cls, form: Form, target: Layout, repeats: tuple[int, ...], engine: Engine
    ) -> "Redistribution":
        """Plans the redistribution of one of equal parts, which each rank repeats."""
        shape = tuple(1 if dim in repeats else size for dim, size in enumerate(form.shape))
        once = engine.form(shape, form.layout, form.dtype, form.device)
        axes = [axis for dim in repeats for axis in target.dim_axes(dim)]
        redistribution = cls.to(once, target.without(*axes), engine)
        local = target.local_shape(form.shape, engine.world.position)
        stages = () if redistribution is None else redistribution.stages
        return cls(form, target, stages, local, None, repeats=repeats)

    @classmethod
    def of_weight(cls, form: Form, target: Layout, engine: Engine) -> "Redistribution | None":
        """Plans with the dims in the order of the variable's memory.

        A kernel and its transpose, which a backward pass reads, are all-gathered once.
        """
        order = memory_order(form.strides)
        if form.is_contiguous or form.strides != strides_in(order, form.shape):
            return cls.to(form, target, engine)
        shape = tuple(form.shape[dim] for dim in order)
        layout = with_dims(form.layout, order)
        own = engine.evolved(form, shape=shape, strides=None, layout=layout)
        redistribution = cls.to(own, with_dims(target, order), engine)
        return None if redistribution is None else attrs.evolve(redistribution, order=order)

    def run(self, part: torch.Tensor, engine: Engine) -> torch.Tensor:
        """Redistributes this rank's shard. All ranks call it together."""
        if any(step.kind != "slice" for _, steps in self.stages for step in steps):
            check_thread()
        with redistribution_scope(Move(part, self.form.shape, self.form.layout, self.target)):
            part = self.to_step_order(part)
            for dim in self.repeats:
                part = part.narrow(dim, 0, 1)
            for shape, steps in self.stages:
                part = part.reshape(shape)
                for step in steps:
                    part = STEPS[step.kind](part, step, engine)
        if self.repeats:
            once = (1 if dim in self.repeats else size for dim, size in enumerate(self.shape))
            return part.reshape(*once).expand(self.shape)
        part = self.to_form_order(part.reshape(self.shape))
        return part if self.fill is None else torch.full_like(part, self.fill)

    def to_step_order(self, tensor: torch.Tensor) -> torch.Tensor:
        """Permutes dims from the order of `form` to that of the steps."""
        return tensor if self.order is None else tensor.permute(self.order)

    def to_form_order(self, tensor: torch.Tensor) -> torch.Tensor:
        """Permutes dims from the order of the steps to that of `form`."""
        if self.order is None:
            return tensor
        return tensor.permute(inverse(self.order))


def _stages(form: Form, target: Layout, engine: Engine) -> tuple[_Stage, ...]:
    """Plans the stages to `target`, each with the shape of the local shard before."""
    planned = stages(form.layout, target, form.shape, form.dtype.itemsize, engine.costs)
    rank = engine.world.position
    return tuple((stage.layout.local_shape(stage.shape, rank), stage.steps) for stage in planned)


def in_layout(tensor: ShardedTensor, layout: Layout, copies: bool = False) -> ShardedTensor:
    """Redistributes `tensor`, or takes its cached copy.

    With `copies`, the result has separate memory, to be written into.
    """
    engine: Engine = tensor.engine
    redistribution = Redistribution.to(tensor.form, layout, engine)
    if redistribution is None:
        return tensor
    known = None if layout.partial else find_copy(tensor)
    if known is not None:
        same = in_layout(known.tensor, layout, copies)
        if copies and same is known.tensor:
            return engine.wrap(same.part.clone(), same.form)
        return engine.wrap(same.part, same.form, same.memory)
    part = redistribution.run(tensor.part, engine)
    # For a new partial sum, one rank has the values of `tensor`, and the others zeros.
    if copies and layout.partial and part.data_ptr() == tensor.part.data_ptr():
        part = part.clone()
    copy = engine.sharded(part, redistribution.target, tensor.form.shape)
    note_copy(tensor, copy)
    return copy


def redistribute_operand(
    tensor: ShardedTensor, move: Redistribution, serves: bool = False
) -> torch.Tensor:
    """Redistributes the local shard of `tensor`; a weight may come from the cache.

    `serves` says whether products read the redistributed copy from now on.
    """
    engine: Engine = tensor.engine
    part: torch.Tensor = tensor.part
    if tensor.form.weight:
        return engine.unsharded.get(tensor.memory, part, move, engine)
    shard = move.run(part, engine)
    # A move that ignores pending reductions leaves them to the result.
    if move.form is tensor.form and not move.target.partial:
        same = engine.wrap(shard, engine.evolved(tensor.form, layout=move.target))
        note_copy(tensor, same, serves)
    return shard


def full(tensor: ShardedTensor) -> torch.Tensor:
    """Replicates `tensor` as a plain one, which may share its memory."""
    return in_layout(tensor, Layout.replicated(tensor.engine.world.mesh, tensor.ndim)).part


def reduced(tensor: torch.Tensor) -> Any:
    """Reduces a partial tensor; any other, also a plain one, stays as it is."""
    if not isinstance(tensor, ShardedTensor):
        return tensor
    return in_layout(tensor, tensor.form.layout.reduced)


def local_shard(value: torch.Tensor, layout: Layout, engine: Engine) -> torch.Tensor:
    """Takes this rank's shard of the plain `value`, sharing its memory if possible."""
    shape, rank = tuple(value.shape), engine.world.position
    sizes, plain = without_segments(layout, shape)
    if sizes == shape:
        return value[layout.slices(shape, rank)]
    part = value.reshape(sizes)[plain.slices(sizes, rank)]
    return part.reshape(layout.local_shape(shape, rank))


# The bytes that all ranks together send at once. Smaller tensors are all-gathered at once.
GATHERED_BYTES = 1 * 1024 * 1024


def gather_in_pieces(tensor: ShardedTensor, at_once: int = GATHERED_BYTES) -> torch.Tensor:
    """All-gathers `tensor`, which is not partial, as a plain one.

    A collective on whole shards would hold a second full tensor: its result has the shards one
    after another, and gloo copies them. Here little is held beside the full tensor.
    """
    check_thread()
    engine, form, world = tensor.engine, tensor.form, tensor.engine.world
    sizes, layout = without_segments(form.layout, form.shape)
    axes = [axis for dim in range(layout.ndim) for axis in layout.dim_axes(dim)]
    ranks = _in_gathered_order(axes, world, world.position)
    part = tensor.part.reshape(layout.local_shape(sizes, world.position))
    held = [layout.slices(sizes, rank) for rank in ranks]
    full = part.new_empty(sizes)
    largest = layout.local_shape(sizes, rank=0)
    most = at_once // form.dtype.itemsize // len(ranks)
    target = Layout.replicated(world.mesh, form.ndim)
    with redistribution_scope(Move(tensor.part, form.shape, form.layout, target)):
        for piece in pieces(largest, most):
            sent = pad_to_size(
                part[piece], math.prod(bounds.stop - bounds.start for bounds in piece)
            )
            for axis in axes:
                sent = wait(collectives.all_gather(sent, engine.groups[axis]), "all_gather")
            for slices, values in zip(held, sent.chunk(len(ranks)), strict=True):
                view = full[slices][piece]
                view.copy_(values[: view.numel()].reshape(view.shape))
    return full.reshape(form.shape)


def _in_gathered_order(axes: Sequence[str], world: World, rank: int) -> list[int]:
    """Lists the ranks whose pieces `rank` has after all-gathers along `axes`, in their order."""
    if not axes:
        return [rank]
    peers = world.peers(axes[-1], rank)
    return [source for peer in peers for source in _in_gathered_order(axes[:-1], world, peer)]
