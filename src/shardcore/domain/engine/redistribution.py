"""Redistribution from one layout to another: an ordered list of steps along one axis each, as data.

Every step is an edge in the graph of layouts, from the table `TRANSITIONS`. `plan` takes the
cheapest path. A step costs the seconds in which a collective starts and each rank sends its bytes,
for even shards (`domain.cost.collective_cost`). Only axes that must move do. An axis can leave a
dim only as the last (minor) one that shards it, and enters a dim as the last: the pieces stay
chunks of chunks.

The bytes are those of bandwidth-optimal algorithms that forward nothing: a rank sends each other
rank of its axis group the elements that this rank needs. Let the axis have `n` ranks, which hold
`B` bytes together (of partial values: each of them). For even shards a rank sends `B(n-1)/n` in an
all-gather or a reduce-scatter, and `B(n-1)/n²` in an all-to-all. It sends `2B(n-1)/n` in an
all-reduce, which is a reduce-scatter and an all-gather of flat chunks. Uneven shards are counted
exactly, in elements. An axis of one rank needs no collective: its steps are slices.
"""

import math
from collections.abc import Iterable, Iterator
from functools import cached_property, lru_cache
from heapq import heappop, heappush
from itertools import count, takewhile
from typing import TypeAlias

import attrs

from shardcore.domain.cost.collective_cost import Costs, Kind
from shardcore.domain.errors import LayoutError
from shardcore.domain.layouts.layout import Layout
from shardcore.domain.layouts.memory_order import overlap
from shardcore.domain.layouts.placements import Partial, Placement, Replicate, Shard

TRANSITIONS: dict[tuple[type[Placement], type[Placement]], Kind] = {
    (Replicate, Shard): "slice",
    (Shard, Replicate): "all_gather",
    (Shard, Shard): "all_to_all",
    (Partial, Replicate): "all_reduce",
    (Partial, Shard): "reduce_scatter",
}


def transition(source: Placement, target: Placement) -> Kind | None:
    """Finds the step along one axis from one placement to another; None when they are equal.

    Raises:
        LayoutError: If no step leads there: no tensor becomes partial, or changes its reduction.

    Example:
        >>> transition(Partial("sum"), Shard(0))
        'reduce_scatter'
    """
    if source == target:
        return None
    kind = TRANSITIONS.get((type(source), type(target)))
    if kind is None:
        raise LayoutError(
            f"No step leads from {source} to {target}: no step makes a tensor partial, "
            "or changes its reduction. Ask for Replicate() or Shard(dim) along this axis."
        )
    return kind


@attrs.frozen
class Step:
    """One step along one axis, of a tensor of global shape `shape`."""

    axis: str  # the mesh axis along which ranks take part
    source: Layout
    target: Layout  # it differs from `source` in the placement along `axis`
    shape: tuple[int, ...]  # the global shape of the tensor
    itemsize: int  # the bytes of one element

    @cached_property
    def kind(self) -> Kind:
        """The kind of the step."""
        kind = transition(self.source.placement(self.axis), self.target.placement(self.axis))
        assert kind is not None, "a step changes the placement of its axis"
        return kind if self.source.mesh.axis_size(self.axis) > 1 else "slice"

    @property
    def source_dim(self) -> int | None:
        """The tensor dim that `axis` shards before, None if it shards none."""
        return _shard_dim(self.source.placement(self.axis))

    @property
    def target_dim(self) -> int | None:
        """The tensor dim that `axis` shards after, None if it shards none."""
        return _shard_dim(self.target.placement(self.axis))

    @property
    def op(self) -> str | None:
        """The reduction, None if nothing is reduced."""
        before = self.source.placement(self.axis)
        return before.op if isinstance(before, Partial) else None

    def part(self, rank: int, peer: int) -> tuple[slice, ...]:
        """Finds the part of the shard of `rank` that `peer` holds after, as a local index.

        Both are in one axis group; they may be the same rank.
        """
        here, _ = overlap(
            self.source.slices(self.shape, rank), self.target.slices(self.shape, peer)
        )
        return here

    def bytes_sent(self, rank: int) -> int:
        """Counts the bytes that `rank` sends to other ranks: exact, also for uneven shards."""
        ranks = self.source.mesh.axis_size(self.axis)
        held = math.prod(self.source.local_shape(self.shape, rank))
        match self.kind:
            case "slice":
                return 0
            case "all_gather":
                return (ranks - 1) * held * self.itemsize
            case "all_reduce":
                (chunk,) = Layout(self.source.mesh, (self.axis,)).local_shape((held,), rank)
                return (held - chunk + (ranks - 1) * chunk) * self.itemsize
            case "all_to_all" | "reduce_scatter":
                kept: int = math.prod(part.stop - part.start for part in self.part(rank, rank))
                return (held - kept) * self.itemsize

    def __str__(self) -> str:
        before, after = self.source.placement(self.axis), self.target.placement(self.axis)
        return f"{self.kind} over {self.axis!r}: {before} -> {after}"


def plan(
    source: Layout,
    target: Layout,
    shape: Iterable[int],
    itemsize: int,
    costs: Costs = Costs(),  # noqa: B008 - it is frozen
) -> tuple[Step, ...]:
    """Plans the cheapest steps that redistribute a tensor from one layout to another.

    Every rank gets the same steps, none if the layouts are equal. `target` may keep a pending
    reduction of `source`. `shape` is global, and an element has `itemsize` bytes.

    Raises:
        LayoutError: If the layouts have different meshes or numbers of dims, `shape` does not
            fit them, or `target` has a pending reduction that `source` has not.

    Example:
        >>> from shardcore.domain.layouts.mesh import Mesh
        >>> mesh = Mesh((2, 2), ("data", "model"))
        >>> source = Layout(mesh, ("model", None), partial={"data": "sum"})
        >>> for step in plan(source, Layout(mesh, (None, "data")), (4, 4), itemsize=4):
        ...     print(step, step.bytes_sent(rank=0))
        reduce_scatter over 'data': P(sum) -> S(1) 16
        all_gather over 'model': S(0) -> R 16
    """
    sizes = tuple(shape)
    _check(source, target, sizes)
    return _cheapest(source, target, sizes, itemsize, costs)


def _check(source: Layout, target: Layout, shape: tuple[int, ...]) -> None:
    if source.mesh != target.mesh:
        raise LayoutError(
            f"Both layouts must be of one mesh, got {source.mesh} and {target.mesh}.",
            got=str(source.mesh),
        )
    for layout in (source, target):
        layout.fitting(shape, "A tensor")
    for axis in source.mesh.axis_names:
        try:
            transition(source.placement(axis), target.placement(axis))
        except LayoutError as error:
            raise LayoutError(
                f"From {source} to {target}, axis {axis!r}: {error}", name=axis
            ) from None


# The seconds and the number of steps of a path.
_Cost: TypeAlias = tuple[float, int]


@lru_cache(maxsize=4096)
def _cheapest(
    source: Layout, target: Layout, shape: tuple[int, ...], itemsize: int, costs: Costs
) -> tuple[Step, ...]:
    """Finds the cheapest path by A*; of equal ones the one with the fewest steps."""
    moving = _leaving(source, target) | _leaving(target, source)
    movable = [axis for axis in source.mesh.axis_names if axis in moving]
    arrival = count()  # ties are taken in the order found, so that all ranks agree
    queue: list[tuple[_Cost, int, float, Layout, tuple[Step, ...]]] = []
    heappush(queue, (_missing(source, target, costs), next(arrival), 0.0, source, ()))
    done: set[Layout] = set()
    while queue:
        _, _, seconds, layout, steps = heappop(queue)
        if layout == target:  # `_missing` is never above the true cost: no other path is cheaper
            return steps
        if layout in done:
            continue
        done.add(layout)
        for axis in movable:
            for after in _moves(layout, axis, target):
                path = (*steps, Step(axis, layout, after, shape, itemsize))
                so_far = seconds + _seconds(path[-1], costs)
                missing, least = _missing(after, target, costs)
                estimate = (so_far + missing, len(path) + least)
                heappush(queue, (estimate, next(arrival), so_far, after, path))
    raise AssertionError("an axis can always be all-gathered or reduced, then sliced")


def _moves(layout: Layout, axis: str, target: Layout) -> Iterator[Layout]:
    """Yields the layouts after one step along `axis`, if possible in blocks of `target`."""
    before = layout.placement(axis)
    if isinstance(before, Shard) and layout.dim_axes(before.dim)[-1] != axis:
        return
    without = layout.without(axis)
    pending = tuple((a, op) for a, op in layout.partial if a != axis)
    if before != Replicate():
        yield Layout(layout.mesh, without.spec, pending, without.blocks)
    for dim, entry in enumerate(without.spec):
        block = without.blocks[dim] if entry else target.blocks[dim]
        if before != Shard(dim, block):
            spec, blocks = list(without.spec), list(without.blocks)
            spec[dim], blocks[dim] = (*without.dim_axes(dim), axis), block
            yield Layout(layout.mesh, tuple(spec), pending, tuple(blocks))


def _seconds(step: Step, costs: Costs) -> float:
    """Costs the step as if all shards were even."""
    ranks = step.source.mesh.axis_size(step.axis)
    group_shape = step.source.without(step.axis).local_shape(step.shape, rank=0)
    return costs.collective(step.kind, step.axis, ranks, math.prod(group_shape) * step.itemsize)


def _missing(layout: Layout, target: Layout, costs: Costs) -> _Cost:
    """Bounds the cost of any path from `layout` to `target` from below."""
    leave, enter = _leaving(layout, target), _leaving(target, layout)
    starts = (costs.link(axis).latency for axis in sorted(leave) if layout.mesh.axis_size(axis) > 1)
    return (sum(starts), len(leave | enter))


def _leaving(layout: Layout, target: Layout) -> set[str]:
    """Lists the axes that must leave their dim of `layout` because `target` differs there."""
    leaving = {axis for axis, _ in layout.partial} - {axis for axis, _ in target.partial}
    for dim in range(layout.ndim):
        have, want = layout.dim_axes(dim), target.dim_axes(dim)
        pairs = zip(have, want, strict=False) if layout.blocks[dim] == target.blocks[dim] else ()
        stay = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
        leaving.update(have[stay:])
    return leaving


def _shard_dim(placement: Placement) -> int | None:
    return placement.dim if isinstance(placement, Shard) else None
