"""Gradients of a step: their layouts before they are reduced, and the buckets that are sent.

A trace reduces each gradient by itself, and this module forms the buckets, for a step on another
mesh has other ones. The rules are those of `adapters.engine.gradients.Buckets`.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from functools import lru_cache

import attrs

from shardcore.domain.cost.events import (
    TICK,
    Allocation,
    Operators,
    TracedCollective,
    TracedMemory,
    Work,
)
from shardcore.domain.layouts.layout import Layout
from shardcore.domain.layouts.placements import Partial, Replicate
from shardcore.domain.layouts.spec import DimSpec, entry_axes


@lru_cache(maxsize=4096)
def as_target(layout: Layout, target: Layout) -> Layout:
    """Takes `target` with the partial sums of `layout`; `layout` if they differ in more.

    Axes of one rank do not count.
    """
    mesh = layout.mesh
    single = [axis for axis in mesh.axis_names if mesh.axis_size(axis) == 1]
    if layout == target or layout.reduced.without(*single) != target.without(*single):
        return layout
    pending = tuple(partial for partial in layout.partial if partial[0] not in single)
    return Layout(mesh, target.spec, pending, target.blocks)


@lru_cache(maxsize=4096)
def sharded_like(layout: Layout, target: Layout) -> Layout:
    """Shards `layout` like `target` over its replicated axes, so that fewer bytes are summed.

    Example:
        >>> from shardcore.domain.layouts.mesh import Mesh
        >>> mesh = Mesh((2, 2), ("data", "model"))
        >>> gradient = Layout(mesh, (None, None), {"data": "sum"})
        >>> str(sharded_like(gradient, Layout(mesh, (None, "model"))))
        "(None, 'model') with sum over 'data'"
    """
    pending = [axis for axis, _ in layout.partial]
    if layout.blocks != target.blocks or not layout.reduced.is_replicated:
        return layout
    if any(_is_nested(entry, pending) for entry in target.spec):
        return layout
    return Layout(layout.mesh, target.without(*pending).spec, layout.partial)


def _is_nested(entry: DimSpec, pending: Sequence[str]) -> bool:
    """Tells whether a pending axis shards a dim that another axis shards further."""
    last = [axis in pending for axis in entry_axes(entry)]
    return last != sorted(last)


def is_reduced_at_output(output: Layout) -> bool:
    """Tells whether the gradient of an output in this layout is reduced at the layer's output.

    An output without rows of the batch depends on variables only, whose gradients are reduced in
    buckets (ADR 4). The gradient of a partial maximum cannot be a partial sum.
    """
    chosen = any(op != "sum" for _, op in output.partial)
    return chosen or not output.reduced.is_replicated


def layout_at_output(gradient: Layout, output: Layout) -> Layout:
    """Takes `output`, reduced, if `gradient` shards only what it shards; else `gradient` reduced.

    Example:
        >>> from shardcore.domain.layouts.mesh import Mesh
        >>> mesh = Mesh((2, 2), ("data", "model"))
        >>> output = Layout(mesh, ("data", None))
        >>> str(layout_at_output(Layout(mesh, (None, None), {"model": "sum"}), output))
        "('data', None)"
        >>> str(layout_at_output(Layout(mesh, ("data", "model")), output))
        "('data', 'model')"
    """
    fits = all(
        isinstance(gradient.placement(axis), Partial | Replicate)
        or gradient.placement(axis) == output.placement(axis)
        for axis in gradient.mesh.axis_names
    )
    return output.reduced if fits else gradient.reduced


# The bytes of a full bucket, as in `DistributedDataParallel`: large enough that the latency of a
# collective is negligible.
BUCKET_BYTES = 25 * 1024 * 1024


@attrs.frozen
class GradientSum:
    """The all-reduce of one gradient: over one axis after the other, if there are several.

    Args:
        path: The path of the variable.
        started: The collectives, one for each axis.
        held: The memory of their results.
    """

    path: str
    started: tuple[TracedCollective, ...]
    held: tuple[TracedMemory, ...]

    @property
    def bytes(self) -> int:
        """The bytes of the gradient."""
        return self.started[0].facts.operand_bytes

    @property
    def bucket_key(self) -> tuple[str, tuple[tuple[str, ...], ...]]:
        """Dtype and axes, which all gradients of a bucket share."""
        return self.started[0].dtype, tuple(collective.facts.axes for collective in self.started)


@attrs.frozen
class Bucket:
    """Gradients that are reduced together.

    Args:
        sums: The gradients.
        full: Whether it is sent when it is full; the others are sent at the end of the pass.
    """

    sums: tuple[GradientSum, ...]
    full: bool


def fill_buckets(sums: Iterable[GradientSum], size: int = BUCKET_BYTES) -> list[Bucket]:
    """Fills buckets with gradients in the order in which they come; lists them as they are sent.

    Example:
        >>> from shardcore.domain.cost.reasons import CollectiveFacts
        >>> collective = TracedCollective(CollectiveFacts("all_reduce", operand_bytes=4), 0)
        >>> sums = [GradientSum(path, (collective,), ()) for path in "abc"]
        >>> buckets = fill_buckets(sums, size=8)
        >>> [("".join(gradient.path for gradient in b.sums), b.full) for b in buckets]
        [('ab', True), ('c', False)]
    """
    buckets: list[Bucket] = []
    waiting: dict[object, list[GradientSum]] = {}
    held: Counter[object] = Counter()  # the bytes of those that wait
    for gradient in sums:
        bucket_key = gradient.bucket_key
        waiting.setdefault(bucket_key, []).append(gradient)
        held[bucket_key] += gradient.bytes
        if held[bucket_key] >= size:
            buckets.append(Bucket(tuple(waiting.pop(bucket_key)), full=True))
            del held[bucket_key]
    return buckets + [Bucket(tuple(rest), full=False) for rest in waiting.values()]


@attrs.frozen
class BucketEvents:
    """The part of a step that buckets make, in place of the all-reduces of single gradients."""

    operators: tuple[Operators, ...]
    collectives: tuple[TracedCollective, ...]
    memory: tuple[Allocation, ...]


def bucket_events(buckets: Sequence[Bucket], end_of_pass: int) -> BucketEvents:
    """Builds the operators, the collectives and the memory of buckets.

    A bucket joins its gradients in one tensor, which is reduced, and freed. At the end of the pass
    each is waited for, and reduced over its further axes.
    """
    operators: list[Operators] = []
    collectives: list[TracedCollective] = []
    memory: list[Allocation] = []
    waits = iter(_further_times(buckets))
    for number, bucket in enumerate(buckets):
        first, last = bucket.sums[0], bucket.sums[-1]
        size = sum(gradient.bytes for gradient in bucket.sums)
        time = last.started[0].time if bucket.full else end_of_pass + 4 * number % TICK
        times = [time, *(next(waits) for _ in first.started[1:])]
        if len(bucket.sums) > 1:
            joined = Work("aten.cat.default", first.started[0].dtype, 0, 2 * size, updates=False)
            operators.append(Operators(joined))
            memory.append(Allocation("activations", size, time + 1, time + 3))
        for at, (begin, started) in enumerate(zip(times, first.started, strict=True)):
            paths = tuple(gradient.path for gradient in bucket.sums)
            facts = attrs.evolve(started.facts, reduced=paths, operand_bytes=size)
            collectives.append(attrs.evolve(started, facts=facts, time=begin))
            end = times[at + 1] + 3 if at + 1 < len(times) else _end(bucket, at)
            memory.append(Allocation(first.held[at].allocation.kind, size, begin + 2, end))
    return BucketEvents(tuple(operators), tuple(collectives), tuple(memory))


def _further_times(buckets: Sequence[Bucket]) -> list[int]:
    """Spaces the reductions over further axes evenly between the traced ones."""
    traced = [
        collective.time
        for bucket in buckets
        for gradient in bucket.sums
        for collective in gradient.started[1:]
    ]
    count = sum(len(bucket.sums[0].started[1:]) for bucket in buckets)
    span = max(traced) - min(traced) if traced else 0
    return [min(traced) + number * span // count for number in range(count)]


def _end(bucket: Bucket, at: int) -> int | None:
    """Finds the time at which a bucket's last gradient is free; None if one is held to the end."""
    ends = [gradient.held[at].allocation.end for gradient in bucket.sums]
    return None if None in ends else max(end for end in ends if end is not None)
