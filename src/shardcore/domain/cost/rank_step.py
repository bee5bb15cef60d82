"""A traced step as one rank of a larger mesh runs it, and its predicted cost.

The two meshes have the same axes, each rank has as many rows of the batch, and axes that shard no
batch have the same sizes. So operators, and collectives of activations, are the same on both. What
differs is the size of shards of variables: it follows from their layouts (ADR 41).

The cost has seconds of computing and of communication, and bytes of memory. The time of Python,
which starts the operators, is not in it.
"""

from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from math import prod
from typing import TypeVar

import attrs

from shardcore.domain.cost.collective_cost import bytes_sent_of, slowest
from shardcore.domain.cost.events import (
    Kind,
    TracedCollective,
    TracedMemory,
    TracedStep,
    Work,
    highest,
)
from shardcore.domain.cost.gradients import BucketEvents, GradientSum, bucket_events, fill_buckets
from shardcore.domain.cost.machine import Machine
from shardcore.domain.cost.reasons import CollectiveFacts
from shardcore.domain.layouts.layout import Layout
from shardcore.domain.layouts.mesh import Mesh
from shardcore.domain.layouts.variable_size import ShardedVariable


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
    """Computes a traced step on a mesh with its axes, in which each rank has as many rows."""
    stored = [held.stored for held in step.memory if held.stored is not None]
    values = {tensor.path: tensor for tensor in reversed(stored)}
    traced_sizes, larger_sizes = _Sizes(step.mesh), _Sizes(mesh)
    before, after = (sum(map(sizes.stored, stored)) for sizes in (traced_sizes, larger_sizes))
    held = [
        piece if piece.stored is None else _with_bytes(piece, larger_sizes.stored(piece.stored))
        for piece in step.memory
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

    def stored(self, tensor: ShardedVariable) -> int:
        key = tensor.spec, tensor.shape, tensor.itemsize
        if key not in self._known:
            self._known[key] = tensor.bytes_on(self.mesh)
        return self._known[key]

    def elements(self, layout: Layout, shape: tuple[int, ...]) -> int:
        """Counts the elements of a shard in a layout, which is one of another mesh."""
        key = layout, shape
        if key not in self._known:
            moved = attrs.evolve(layout, mesh=self.mesh)
            self._known[key] = prod(moved.local_shape(shape, rank=0))
        return self._known[key]


def _resized(
    started: TracedCollective,
    traced_sizes: _Sizes,
    larger_sizes: _Sizes,
    values: Mapping[str, ShardedVariable],
) -> TracedCollective:
    size = _operand_bytes(started.facts, traced_sizes, larger_sizes, values)
    if size == started.facts.operand_bytes:
        return started
    return attrs.evolve(started, facts=attrs.evolve(started.facts, operand_bytes=size))


def _operand_bytes(
    facts: CollectiveFacts,
    traced_sizes: _Sizes,
    larger_sizes: _Sizes,
    values: Mapping[str, ShardedVariable],
) -> int:
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
    """Groups the all-reduces of single gradients by the path of the variable, in order."""
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
    """Tells whether a collective sums one gradient, as a bucket does with several."""
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
    times: dict[_T, int] = {}
    for record in records:
        once = attrs.evolve(record, times=1)
        times[once] = times.get(once, 0) + record.times
    return tuple(attrs.evolve(once, times=count) for once, count in times.items())


@attrs.frozen
class StepCost:
    """The predicted cost of a step for one rank.

    Args:
        compute: The seconds of its operators.
        communication: The seconds of its collectives, by mesh axis.
        exposed: The seconds of collectives during which it computes nothing.
        waited: Those of collectives for which it waits in any case.
        sent: The bytes that it sends, by mesh axis.
        memory: The bytes by kind at the highest point.
    """

    compute: float
    communication: Mapping[str, float]
    exposed: float
    waited: float
    sent: Mapping[str, int]
    memory: Mapping[Kind, int]

    @property
    def seconds(self) -> float:
        """The seconds of the step."""
        return self.compute + self.exposed

    @property
    def peak(self) -> int:
        """The bytes at the highest point."""
        return sum(self.memory.values())


def cost_of(step: RankStep, machine: Machine) -> StepCost:
    """Predicts the cost of a step on a machine.

    An operator takes the longer of its operations and its bytes of memory (`Speed.seconds`). A
    collective takes the latency of its link, once, and the time in which a rank sends its bytes.
    These are the bytes of a ring, which no algorithm goes below: `2B(n-1)/n` in an all-reduce, half
    of it in an all-gather or a reduce-scatter (Patarasuk and Yuan, "Bandwidth optimal all-reduce
    algorithms for clusters of workstations", Journal of Parallel and Distributed Computing 69 (2),
    2009; `bytes_sent`). Where a library takes longer, the link has a lower bandwidth for that kind.
    A collective over several axes has the lowest bandwidth of their links.

    The step waits for collectives of activations. Those of weights and gradients are hidden behind
    its operators, as far as these last and the machine hides them: a captured step starts them
    early and waits late. The rest is exposed.

    Example:
        >>> from shardcore.domain.cost.collective_cost import Link
        >>> from shardcore.domain.cost.machine import Speed
        >>> from shardcore.domain.layouts.mesh import Mesh
        >>> from shardcore.domain.cost.events import Work
        >>> link = Link(latency=0.5, bandwidth=1000)
        >>> machine = Machine("toy", 2, 10**6, {"float32": Speed(100, 100)}, link, link)
        >>> work = Work("aten.mm.default", "float32", flops=300, bytes=100, updates=False)
        >>> moved = RankCollective("all_reduce", ("data",), operand_bytes=2000, waits=True)
        >>> step = RankStep(Mesh((2,), ("data",)), (work,), (moved,), {"variables": 8})
        >>> cost = cost_of(step, machine)
        >>> cost.compute, dict(cost.communication), cost.seconds
        (3.0, {'data': 2.5}, 5.5)
    """
    compute = sum(
        work.times * machine.speed(work.dtype).seconds(work.flops, work.bytes) for work in step.work
    )
    links = machine.links(step.mesh)
    communication: dict[str, float] = {}
    sent: dict[str, int] = {}
    waited = hidden = 0.0
    for collective in step.collectives:
        axis, ranks = ", ".join(collective.axes), step.mesh.size_along(collective.axes)
        size = bytes_sent_of(collective.kind, ranks, collective.operand_bytes)
        link = slowest(links[axis] for axis in collective.axes or links)  # of all for unknown ranks
        seconds = collective.times * link.seconds(size, collective.kind)
        communication[axis] = communication.get(axis, 0.0) + seconds
        sent[axis] = sent.get(axis, 0) + collective.times * size
        if collective.waits:
            waited += seconds
        else:
            hidden += seconds
    exposed = waited + hidden - min(hidden * machine.hidden, compute)
    return StepCost(compute, communication, exposed, waited, sent, step.memory)
