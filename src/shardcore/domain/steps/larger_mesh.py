"""A traced step on a larger mesh.

The two meshes have the same axes, each rank has as many rows of the batch, and axes that shard no
batch have the same sizes. So operators, and collectives of activations, are the same on both. What
differs is the size of shards of variables: it follows from their layouts.
"""

from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from math import prod
from typing import TypeVar

import attrs

from shardcore.domain.explanation.reasons import Facts
from shardcore.domain.layout import Layout
from shardcore.domain.mesh import Mesh
from shardcore.domain.steps.events import Held, Started, Stored, TracedStep, Work
from shardcore.domain.steps.gradient_buckets import Bucketed, Sum, bucketed, filled
from shardcore.domain.steps.memory import Kind, highest


@attrs.frozen
class Moved:
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


_T = TypeVar("_T", Work, Moved)


@attrs.frozen
class RankStep:
    """A step as one rank of a mesh runs it.

    Args:
        mesh: The mesh.
        work: The operators.
        moved: The collectives.
        memory: The bytes by kind at the highest point.
        layers: The parts of groups of layers, if they are asked for.
    """

    mesh: Mesh
    work: tuple[Work, ...]
    moved: tuple[Moved, ...]
    memory: Mapping[Kind, int]
    layers: Mapping[str, "RankStep"] = attrs.field(factory=dict)


def step_on(mesh: Mesh, step: TracedStep) -> RankStep:
    """Returns a traced step on a mesh with its axes, in which each rank has as many rows."""
    stored = [each.stored for each in step.memory if each.stored is not None]
    values = {each.path: each for each in reversed(stored)}
    then, here = _Sizes(step.mesh), _Sizes(mesh)
    before, after = (sum(map(sizes.stored, stored)) for sizes in (then, here))
    held = [
        each if each.stored is None else _with_bytes(each, here.stored(each.stored))
        for each in step.memory
    ]
    started = [_on(each, then, here, values) for each in step.collectives]
    sums = _sums(started, held)
    added = bucketed(filled(sums.values()), step.end_of_pass)
    work = (
        attrs.evolve(each.work, bytes=each.work.bytes * after // max(before, 1))
        if each.work.updates
        else each.work
        for each in (*step.operators, *added.operators)
    )
    allocations = [each.allocation for each in held if each.sum_of not in sums]
    return RankStep(
        mesh,
        _counted(work),
        _counted(_moved(started, sums, added)),
        highest([*allocations, *added.memory]),
    )


def _with_bytes(held: Held, size: int) -> Held:
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


def _on(started: Started, then: _Sizes, here: _Sizes, values: Mapping[str, Stored]) -> Started:
    """Returns a collective with the bytes of its operands on the larger mesh."""
    size = _operand_bytes(started.facts, then, here, values)
    if size == started.facts.operand_bytes:
        return started
    return attrs.evolve(started, facts=attrs.evolve(started.facts, operand_bytes=size))


def _operand_bytes(facts: Facts, then: _Sizes, here: _Sizes, values: Mapping[str, Stored]) -> int:
    """Returns the bytes of the operands of a collective on the larger mesh."""
    if _waits(facts):
        return facts.operand_bytes
    if facts.source is not None and facts.shape is not None:
        small, large = (each.elements(facts.source, facts.shape) for each in (then, here))
    else:  # the sum of gradients
        reduced = [values[path] for path in facts.reduced]
        small, large = (sum(map(each.stored, reduced)) for each in (then, here))
    return facts.operand_bytes * large // max(small, 1)


def _waits(facts: Facts) -> bool:
    return not facts.reduced and facts.variable is None


def _sums(started: Iterable[Started], held: Iterable[Held]) -> dict[str, Sum]:
    """Returns the all-reduces of single gradients, by the path of the variable, in order."""
    memory: dict[str, list[Held]] = {}
    for each in held:
        if each.sum_of:
            memory.setdefault(each.sum_of, []).append(each)
    reductions: dict[str, list[Started]] = {}
    for one in started:
        if is_sum(one.facts):
            reductions.setdefault(one.facts.reduced[0], []).append(one)
    return {
        path: Sum(path, tuple(found), tuple(memory[path]))
        for path, found in reductions.items()
        if len(memory.get(path, ())) == len(found)
    }


def is_sum(facts: Facts) -> bool:
    """Returns whether a collective sums one gradient, as a bucket does with several."""
    return facts.kind == "all_reduce" and len(facts.reduced) == 1 and facts.source is None


def _moved(started: Sequence[Started], sums: Mapping[str, Sum], added: Bucketed) -> Iterator[Moved]:
    kept = [each for each in started if not (is_sum(each.facts) and each.facts.reduced[0] in sums)]
    for each in sorted([*kept, *added.collectives], key=lambda each: each.time):
        facts = each.facts
        yield Moved(facts.kind, facts.axes, facts.operand_bytes, _waits(facts))


def _counted(each: Iterable[_T]) -> tuple[_T, ...]:
    """Returns equal operators, or equal collectives, as one with their number."""
    times: dict[_T, int] = {}
    for one in each:
        once = attrs.evolve(one, times=1)
        times[once] = times.get(once, 0) + one.times
    return tuple(attrs.evolve(once, times=count) for once, count in times.items())
