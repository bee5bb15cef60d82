"""What a step moves between ranks, as data: its collectives, and the layers that they are for."""

from collections import Counter
from collections.abc import Callable, Collection, Iterable
from math import prod
from typing import Literal, TypeAlias

import attrs

from shardcore.domain.cost import bytes_sent
from shardcore.domain.mesh import Mesh
from shardcore.domain.spec import DimSpec
from shardcore.domain.variable_size import VariableSize

Phase: TypeAlias = Literal["batch", "forward", "loss and metrics", "backward", "update"]


@attrs.frozen
class Collective:
    """A collective of a step, or several that are equal in all of this.

    Args:
        kind: "all_reduce", "all_gather", "reduce_scatter", "all_to_all" or "broadcast".
        phase: The part of the step that it belongs to.
        layer: The path of the layer that needs it; in the backward pass the one whose forward
            operator is gone through. Empty outside the model.
        operator: The operator that needs it: "aten.mm.default". Empty where none does.
        axes: The mesh axes along which the ranks take part.
        ranks: How many take part.
        operand_bytes: The bytes of this rank's operands, of each time.
        sent_bytes: The bytes that one rank sends to others by theory, of each time.
        variables: The paths of the variables, or of those whose gradients, are moved.
        shape: The global shape of what is moved, where it is one tensor that is known.
        change: Its placements before and after, over `axes`: "S(1) -> R". Empty where not known.
        reason: Why, in words.
        times: How often.
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
    """A collective that another rule of the layout map would spare.

    Args:
        collective: The collective.
        problem: What forces it.
        rules: The rules to write, specs by keys; None where a rule is to be taken out.
        effect: What they change.
    """

    collective: Collective
    problem: str
    rules: dict[str, tuple[DimSpec, ...] | None]
    effect: str


@attrs.frozen
class ExplainedVariable(VariableSize):
    """A variable of a layer.

    Args:
        path: Its path.
        shape: Its global shape.
        itemsize: The bytes of one element.
        spec: Per tensor dim the mesh axes that split it.
    """

    spec: tuple[DimSpec, ...] = attrs.field(kw_only=True)


@attrs.frozen
class ExplainedLayer:
    """A layer that the step called.

    Args:
        path: Its path.
        kind: The name of its class.
        depth: How many layers it is called inside of.
        calls: How often it was called.
        variables: Its own variables, and not those of layers that it calls.
        shape: The global shape of its output, the first if it has several; None without one.
        spec: Its layout: per tensor dim the mesh axes that split it.
    """

    path: str
    kind: str
    depth: int
    calls: int
    variables: tuple[ExplainedVariable, ...]
    shape: tuple[int, ...] | None
    spec: tuple[DimSpec, ...] | None


@attrs.frozen
class Explained:
    """What one step of a model moves between ranks, as this rank saw it.

    Args:
        model: The model's name.
        step: "train", "test" or "predict".
        mesh: The mesh; None where no distribution is set.
        strategy: The strategy's name; empty where no distribution is set.
        rank: The rank of the mesh that this is of.
        layers: The layers that the step called, in the order of the first calls.
        collectives: The collectives of the step, in order; equal ones once, with how often.
        avoidable: Those that another rule would spare, with the rule.
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
        """How many collectives are started, by kind."""
        return self._sum(lambda each: 1)

    @property
    def operand_bytes(self) -> "Counter[str]":
        """The bytes of this rank's operands, by kind."""
        return self._sum(lambda each: each.operand_bytes)

    def _sum(self, value: Callable[[Collective], int]) -> "Counter[str]":
        total: Counter[str] = Counter()
        for each in self.collectives:
            total[each.kind] += each.times * value(each)
        return total

    def is_avoidable(self, collective: Collective) -> bool:
        """Returns whether another rule would spare `collective`."""
        once = attrs.evolve(collective, times=1)
        return any(each.collective == once for each in self.avoidable)


def sent_bytes(kind: str, operand_bytes: int, ranks: int) -> int:
    """Returns the bytes that one rank sends by theory, when all ranks have operands of one size.

    Those of `Step.bytes_sent` for an even split.

    Example:
        >>> sent_bytes("all_reduce", 96, ranks=4), sent_bytes("all_gather", 96, ranks=4)
        (144, 288)
    """
    # A rank's operand is a shard of what the ranks hold together, or all of it.
    held = operand_bytes * (ranks if kind in ("all_gather", "all_to_all") else 1)
    return round(bytes_sent(kind, ranks, held))


def axes_of(mesh: Mesh, processes: Iterable[int], group: Collection[int]) -> tuple[str, ...]:
    """Returns the axes of `mesh` that the processes of `group` lie along, or none.

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
    places = zip(*(at[process] for process in group), strict=True)
    axes = [axis for axis, own in zip(mesh.axis_names, places, strict=True) if len(set(own)) > 1]
    complete = len(group) == prod(map(mesh.axis_size, axes))
    return tuple(axes) if complete else ()


def counted(collectives: Iterable[Collective]) -> tuple[Collective, ...]:
    """Returns equal collectives as one, with how often, in the order of the first."""
    times: dict[Collective, int] = {}
    for each in collectives:
        once = attrs.evolve(each, times=1)
        times[once] = times.get(once, 0) + each.times
    return tuple(attrs.evolve(each, times=count) for each, count in times.items())
