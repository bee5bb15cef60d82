"""The collectives of a step as data, with the layers that need them."""

from collections import Counter
from collections.abc import Callable, Collection, Iterable
from math import prod
from typing import Literal, TypeAlias

import attrs

from shardcore.domain.layouts.mesh import Mesh
from shardcore.domain.layouts.spec import DimSpec
from shardcore.domain.layouts.variable_size import ShardedVariable

Phase: TypeAlias = Literal["batch", "forward", "loss and metrics", "backward", "update"]


@attrs.frozen
class Collective:
    """A collective of a step, or several that are equal in all attributes.

    Args:
        kind: "all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", or "send":
            an all-to-all in which each rank sends to the next one only.
        phase: The phase of the step.
        layer: The path of the layer that needs it. In the backward pass this is the layer of the
            forward operator. Empty outside the model.
        operator: The operator that needs it: "aten.mm.default". Empty if none does.
        axes: The mesh axes along which the ranks take part.
        ranks: The number of ranks that take part.
        operand_bytes: The bytes of this rank's operands, each time.
        sent_bytes: The bytes that one rank sends in theory, each time.
        variables: The paths of the variables that are moved, or whose gradients are.
        shape: The global shape of the tensor; None for several tensors or an unknown one.
        change: Its placements before and after, over `axes`: "S(1) -> R". Empty if unknown.
        reason: The reason in words.
        times: The number of equal collectives.
    """

    kind: str
    phase: Phase
    layer: str
    operator: str
    axes: tuple[str, ...]
    ranks: int
    operand_bytes: int
    sent_bytes: int
    variables: tuple[str, ...]
    shape: tuple[int, ...] | None
    change: str
    reason: str
    times: int = 1


@attrs.frozen
class Avoidable:
    """A collective that another rule of the layout map would avoid.

    Args:
        collective: The collective.
        problem: Its cause.
        rules: The rules to set, specs by keys; None for a rule to remove.
        effect: The effect of these rules.
    """

    collective: Collective
    problem: str
    rules: dict[str, tuple[DimSpec, ...] | None]
    effect: str


@attrs.frozen
class ExplainedLayer:
    """A layer that the step called.

    Args:
        path: Its path.
        kind: The name of its class.
        depth: The number of layers around the call.
        calls: The number of calls.
        variables: Its variables, without those of layers that it calls.
        shape: The global shape of its first output; None without one.
        spec: The layout of that output: per tensor dim the mesh axes that shard it.
        itemsize: The bytes of one element of that output.
    """

    path: str
    kind: str
    depth: int
    calls: int
    variables: tuple[ShardedVariable, ...]
    shape: tuple[int, ...] | None
    spec: tuple[DimSpec, ...] | None
    itemsize: int = 4


@attrs.frozen
class Explained:
    """The collectives of one step of a model, as seen by one rank.

    Args:
        model: The model's name.
        step: "train", "test" or "predict".
        mesh: The mesh; None if no distribution is set.
        strategy: The strategy's name; empty if no distribution is set.
        rank: That rank of the mesh.
        layers: The layers that the step called, in the order of the first calls.
        collectives: The collectives of the step, in order; equal ones once, with their number.
        avoidable: Those that another rule would avoid, with the rule.
    """

    model: str
    step: str
    mesh: Mesh | None
    strategy: str
    rank: int
    layers: tuple[ExplainedLayer, ...]
    collectives: tuple[Collective, ...]
    avoidable: tuple[Avoidable, ...] = ()

    @property
    def calls(self) -> "Counter[str]":
        """The number of collectives, by kind."""
        return self._sum(lambda collective: 1)

    @property
    def operand_bytes(self) -> "Counter[str]":
        """The bytes of this rank's operands, by kind."""
        return self._sum(lambda collective: collective.operand_bytes)

    def _sum(self, value: Callable[[Collective], int]) -> "Counter[str]":
        total: Counter[str] = Counter()
        for collective in self.collectives:
            total[collective.kind] += collective.times * value(collective)
        return total

    def remedies(self, collective: Collective) -> tuple[Avoidable, ...]:
        """The changes of rules that would avoid `collective`."""
        once = attrs.evolve(collective, times=1)
        return tuple(advice for advice in self.avoidable if advice.collective == once)


def axes_of(mesh: Mesh, processes: Iterable[int], group: Collection[int]) -> tuple[str, ...]:
    """Finds the axes of `mesh` along which `group` extends; none if it is no group of the mesh.

    Args:
        mesh: The mesh.
        processes: The process at each rank of the mesh.
        group: The processes that take part.

    Example:
        >>> mesh = Mesh((2, 2), ("data", "model"))
        >>> axes_of(mesh, range(4), [1, 3]), axes_of(mesh, range(4), range(4))
        (('data',), ('data', 'model'))
    """
    at = {process: mesh.coordinate(rank) for rank, process in enumerate(processes)}
    if not set(group) <= at.keys():
        return ()
    coordinates = zip(*(at[process] for process in group), strict=True)
    axes = [
        axis for axis, own in zip(mesh.axis_names, coordinates, strict=True) if len(set(own)) > 1
    ]
    complete = len(group) == prod(map(mesh.axis_size, axes))
    return tuple(axes) if complete else ()


def merge_equal(collectives: Iterable[Collective]) -> tuple[Collective, ...]:
    """Counts equal collectives as one, in the order of the first ones."""
    times: dict[Collective, int] = {}
    for collective in collectives:
        once = attrs.evolve(collective, times=1)
        times[once] = times.get(once, 0) + collective.times
    return tuple(attrs.evolve(collective, times=count) for collective, count in times.items())
