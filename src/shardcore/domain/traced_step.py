"""A step as one rank of a small mesh runs it, and what the same step is on a larger mesh.

The two meshes have the same axes, each rank has as many rows of the batch, and axes that split no
batch have the same sizes. So operators, and collectives of activations, are the same on both. What
differs is the size of shards of variables: it follows from their layouts.
"""

from collections.abc import Iterable, Mapping
from math import prod
from typing import TypeVar

import attrs

from shardcore.domain.explanation.reasons import Facts
from shardcore.domain.layout import Layout
from shardcore.domain.memory import Allocation, Kind, highest
from shardcore.domain.mesh import Mesh
from shardcore.domain.spec import DimSpec


@attrs.frozen
class Work:
    """Equal operators of a step, on this rank's shards.

    Args:
        operator: The operator: "aten.mm.default".
        dtype: The dtype in which it computes.
        flops: The operations of a matrix product, a convolution or an attention; else 0.
        bytes: The bytes that it reads and writes: its operands and its results.
        updates: Whether it belongs to the update of the optimizer.
        times: The number of such operators.
    """

    operator: str
    dtype: str
    flops: int
    bytes: int
    updates: bool
    times: int = 1


@attrs.frozen
class Stored:
    """A tensor of a variable: its value, its gradient, or a state of the optimizer.

    Args:
        path: The path of the variable.
        shape: Its global shape.
        spec: Its storage layout.
        itemsize: The bytes of one element.
    """

    path: str
    shape: tuple[int, ...]
    spec: tuple[DimSpec, ...]
    itemsize: int

    def bytes_on(self, mesh: Mesh) -> int:
        """Returns the bytes of the first rank, which has most.

        Example:
            >>> kernel = Stored("kernel", (6, 2), ("data", None), 4)
            >>> kernel.bytes_on(Mesh((2,), ("data",))), kernel.bytes_on(Mesh((4,), ("data",)))
            (24, 16)
        """
        return prod(Layout(mesh, self.spec).local_shape(self.shape, rank=0)) * self.itemsize


@attrs.frozen
class Moved:
    """Equal collectives of a step.

    Args:
        kind: "all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send" or "broadcast".
        axes: The mesh axes along which ranks take part.
        operand_bytes: The bytes of the operands of a rank, each time.
        waits: Whether the step waits for it: it moves an activation. Weights may be gathered, and
            gradients reduced, while the step computes.
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
    """

    mesh: Mesh
    work: tuple[Work, ...]
    moved: tuple[Moved, ...]
    memory: Mapping[Kind, int]


@attrs.frozen
class TracedStep:
    """A step as the first rank of a small mesh runs it.

    Args:
        mesh: The small mesh.
        work: The operators.
        facts: The collectives, each with its layouts.
        allocations: The memory over time; of a variable's tensors, by their number in `stored`.
        stored: The tensors of variables: values, states of the optimizer, gradients.
    """

    mesh: Mesh
    work: tuple[Work, ...]
    facts: tuple[Facts, ...]
    allocations: tuple[tuple[Allocation, int | None], ...]
    stored: tuple[Stored, ...]

    def on(self, mesh: Mesh) -> RankStep:
        """Returns the step on a mesh with these axes, in which each rank has as many rows."""
        before, after = self._kept(self.mesh), self._kept(mesh)
        work = (
            attrs.evolve(each, bytes=each.bytes * after // max(before, 1)) if each.updates else each
            for each in self.work
        )
        held = (
            each if number is None else attrs.evolve(each, bytes=self.stored[number].bytes_on(mesh))
            for each, number in self.allocations
        )
        return RankStep(mesh, _counted(work), self._moved(mesh), highest(list(held)))

    def _kept(self, mesh: Mesh) -> int:
        """Returns the bytes of the tensors of variables, which an update reads and writes."""
        return sum(each.bytes_on(mesh) for each in self.stored)

    def _moved(self, mesh: Mesh) -> tuple[Moved, ...]:
        values = {each.path: each for each in reversed(self.stored)}
        found = (
            Moved(each.kind, each.axes, _operand_bytes(each, self.mesh, mesh, values), _waits(each))
            for each in self.facts
        )
        return _counted(found)


def _waits(facts: Facts) -> bool:
    return not facts.reduced and facts.variable is None


def _operand_bytes(facts: Facts, before: Mesh, after: Mesh, values: Mapping[str, Stored]) -> int:
    """Returns the bytes of the operands of a collective on the mesh `after`."""
    if _waits(facts):
        return facts.operand_bytes
    if facts.source is not None and facts.shape is not None:
        sizes = (_local_size(facts.source, facts.shape, mesh) for mesh in (before, after))
    else:  # a bucket of gradients
        reduced = [values[path] for path in facts.reduced]
        sizes = (sum(each.bytes_on(mesh) for each in reduced) for mesh in (before, after))
    small, large = sizes
    return facts.operand_bytes * large // max(small, 1)


def _local_size(layout: Layout, shape: tuple[int, ...], mesh: Mesh) -> int:
    moved = attrs.evolve(layout, mesh=mesh)
    return prod(moved.local_shape(shape, rank=0))


def _counted(each: Iterable[_T]) -> tuple[_T, ...]:
    """Returns equal operators, or equal collectives, as one with their number."""
    times: dict[_T, int] = {}
    for one in each:
        once = attrs.evolve(one, times=1)
        times[once] = times.get(once, 0) + one.times
    return tuple(attrs.evolve(once, times=count) for once, count in times.items())
