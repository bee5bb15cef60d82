"""A traced step on a larger mesh.

The two meshes have the same axes, each rank has as many rows of the batch, and axes that shard no
batch have the same sizes. So operators, and collectives of activations, are the same on both. What
differs is the size of shards of variables: it follows from their layouts.
"""

from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from math import prod
from typing import TypeVar

import attrs

from shardcore.domain.cost.events import (
    Kind,
    Stored,
    TracedCollective,
    TracedMemory,
    TracedStep,
    Work,
    highest,
)
from shardcore.domain.cost.gradients import BucketEvents, GradientSum, bucket_events, fill_buckets
from shardcore.domain.cost.reasons import CollectiveFacts
from shardcore.domain.layouts.layout import Layout
from shardcore.domain.layouts.mesh import Mesh


@attrs.frozen
class RankCollective:
    """Equal collectives of a step.

    Args:
        kind: "all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send" or "broadcast".
        axes: The mesh axes along which ranks take part.
        operand_bytes: The bytes of the operands of a rank, each time.
        waits: Whether the step waits for it: it moves an activation. Weights may be all-gathered,
            and gradients reduced, while the step computes.
        times: The number of such collectives.
    """

    kind: str
    axes: tuple[str, ...]
    operand_bytes: int
    waits: bool
    times: int = 1


_T = TypeVar("_T", Work, RankCollective)


@attrs.frozen
class RankStep:
    """A step as one rank of a mesh runs it.

    Args:
        mesh: The mesh.
        work: The operators.
        collectives: The collectives.
        memory: The bytes by kind at the highest point.
        layers: The parts of groups of layers, if they are asked for.
    """

    mesh: Mesh
    work: tuple[Work, ...]
    collectives: tuple[RankCollective, ...]
    memory: Mapping[Kind, int]
    layers: Mapping[str, "RankStep"] = attrs.field(factory=dict)


def step_on(mesh: Mesh, step: TracedStep) -> RankStep:
    """Returns a traced step on a mesh with its axes, in which each rank has as many rows."""
    stored = [held.stored for held in step.memory if held.stored is not None]
    values = {tensor.path: tensor for tensor in reversed(stored)}
    traced_sizes, larger_sizes = _Sizes(step.mesh), _Sizes(mesh)
    before, after = (sum(map(sizes.stored, stored)) for sizes in (traced_sizes, larger_sizes))
    held = [
        memory if memory.stored is None else _with_bytes(memory, larger_sizes.stored(memory.stored))
        for memory in step.memory
    ]
    started = [
        _resized(collective, traced_sizes, larger_sizes, values) for collective in step.collectives
    ]
    sums = _gradient_sums(started, held)
    from_buckets = bucket_events(fill_buckets(sums.values()), step.end_of_pass)
    work = (
        attrs.evolve(operator.work, bytes=operator.work.bytes * after // max(before, 1))
        if operator.work.updates
        else operator.work
        for operator in (*step.operators, *from_buckets.operators)
    )
    allocations = [memory.allocation for memory in held if memory.sum_of not in sums]
    return RankStep(
        mesh,
        _merge_equal(work),
        _merge_equal(_rank_collectives(started, sums, from_buckets)),
        highest([*allocations, *from_buckets.memory]),
    )


def _with_bytes(held: TracedMemory, size: int) -> TracedMemory:
    return attrs.evolve(held, allocation=attrs.evolve(held.allocation, bytes=size))


@attrs.frozen
class _Sizes:
    """The sizes of shards on a mesh, each computed once: blocks that repeat have equal ones."""

    mesh: Mesh
    _known: dict[Hashable, int] = attrs.field(factory=dict, init=False)

    def stored(self, tensor: Stored) -> int:
        """Returns the bytes of a tensor of a variable."""
        key = tensor.spec, tensor.shape, tensor.itemsize
        if key not in self._known:
            self._known[key] = tensor.bytes_on(self.mesh)
        return self._known[key]

    def elements(self, layout: Layout, shape: tuple[int, ...]) -> int:
        """Returns the elements of a shard in a layout, which is one of another mesh."""
        key = layout, shape
        if key not in self._known:
            moved = attrs.evolve(layout, mesh=self.mesh)
            self._known[key] = prod(moved.local_shape(shape, rank=0))
        return self._known[key]


def _resized(
    started: TracedCollective,
    traced_sizes: _Sizes,
    larger_sizes: _Sizes,
    values: Mapping[str, Stored],
) -> TracedCollective:
    """Returns a collective with the bytes of its operands on the larger mesh."""
    size = _operand_bytes(started.facts, traced_sizes, larger_sizes, values)
    if size == started.facts.operand_bytes:
        return started
    return attrs.evolve(started, facts=attrs.evolve(started.facts, operand_bytes=size))


def _operand_bytes(
    facts: CollectiveFacts, traced_sizes: _Sizes, larger_sizes: _Sizes, values: Mapping[str, Stored]
) -> int:
    """Returns the bytes of the operands of a collective on the larger mesh."""
    if _waits(facts):
        return facts.operand_bytes
    if facts.source is not None and facts.shape is not None:
        small, large = (
            sizes.elements(facts.source, facts.shape) for sizes in (traced_sizes, larger_sizes)
        )
    else:  # the sum of gradients
        reduced = [values[path] for path in facts.reduced]
        small, large = (sum(map(sizes.stored, reduced)) for sizes in (traced_sizes, larger_sizes))
    return facts.operand_bytes * large // max(small, 1)


def _waits(facts: CollectiveFacts) -> bool:
    return not facts.reduced and facts.variable is None


def _gradient_sums(
    started: Iterable[TracedCollective], held: Iterable[TracedMemory]
) -> dict[str, GradientSum]:
    """Returns the all-reduces of single gradients, by the path of the variable, in order."""
    memory: dict[str, list[TracedMemory]] = {}
    for piece in held:
        if piece.sum_of:
            memory.setdefault(piece.sum_of, []).append(piece)
    reductions: dict[str, list[TracedCollective]] = {}
    for collective in started:
        if is_sum(collective.facts):
            reductions.setdefault(collective.facts.reduced[0], []).append(collective)
    return {
        path: GradientSum(path, tuple(collectives), tuple(memory[path]))
        for path, collectives in reductions.items()
        if len(memory.get(path, ())) == len(collectives)
    }


def is_sum(facts: CollectiveFacts) -> bool:
    """Returns whether a collective sums one gradient, as a bucket does with several."""
    return facts.kind == "all_reduce" and len(facts.reduced) == 1 and facts.source is None


def _rank_collectives(
    started: Sequence[TracedCollective], sums: Mapping[str, GradientSum], from_buckets: BucketEvents
) -> Iterator[RankCollective]:
    unbucketed = [
        collective
        for collective in started
        if not (is_sum(collective.facts) and collective.facts.reduced[0] in sums)
    ]
    for collective in sorted(
        [*unbucketed, *from_buckets.collectives], key=lambda collective: collective.time
    ):
        facts = collective.facts
        yield RankCollective(facts.kind, facts.axes, facts.operand_bytes, _waits(facts))


def _merge_equal(records: Iterable[_T]) -> tuple[_T, ...]:
    """Merges equal operators, or equal collectives, into one that counts them."""
    times: dict[_T, int] = {}
    for record in records:
        once = attrs.evolve(record, times=1)
        times[once] = times.get(once, 0) + record.times
    return tuple(attrs.evolve(once, times=count) for once, count in times.items())
