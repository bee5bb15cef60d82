"""Layers of a step: what each takes of a traced one, and the cheapest choice for each (ADR 51)."""

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence

import attrs

from shardcore.domain.cost.events import Operators, TracedCollective, TracedMemory, TracedStep
from shardcore.domain.cost.reasons import CollectiveFacts

# The group of what belongs to no layer, such as the loss.
REST = ""


def layer_steps(step: TracedStep, groups: Mapping[str, str]) -> dict[str, TracedStep]:
    """Splits a traced step into the parts of groups of layers, and the rest (`REST`).

    A part has the operators and the collectives of its layers. Of memory it has the tensors of its
    variables, and what the sums of its gradients allocate.

    Args:
        step: The step. Its blocks are the layers.
        groups: The group of each layer, by its path.
    """
    owners = _Owners(groups)
    operators: dict[str, list[Operators]] = {}
    collectives: dict[str, list[TracedCollective]] = {}
    memory: dict[str, list[TracedMemory]] = {}
    for per_block in step.operators:
        for group, part in _by_group(per_block, owners):
            operators.setdefault(group, []).append(part)
    for started in step.collectives:
        collectives.setdefault(_group(started, owners), []).append(started)
    for held in step.memory:
        path = held.sum_of or (held.stored.path if held.stored else "")
        if path:
            memory.setdefault(owners.of(path), []).append(held)
    return {
        group: attrs.evolve(
            step,
            operators=tuple(operators.get(group, ())),
            collectives=tuple(collectives.get(group, ())),
            memory=tuple(memory.get(group, ())),
        )
        for group in dict.fromkeys([*groups.values(), REST])
    }


@attrs.frozen
class _Owners:
    """The groups of paths."""

    groups: Mapping[str, str]

    def of(self, path: str) -> str:
        """Finds the group of the layer with that path, or of the nearest one above it."""
        while path and path not in self.groups:
            path = path.rpartition("/")[0]
        return self.groups[path] if path else REST


def _by_group(operators: Operators, owners: _Owners) -> Iterator[tuple[str, Operators]]:
    """Yields operators by group: those of several blocks by the bytes of each."""
    left = operators.work.bytes
    for block, size in operators.shares:
        left -= size
        yield owners.of(block), Operators(attrs.evolve(operators.work, flops=0, bytes=size))
    yield (
        owners.of(operators.block),
        attrs.evolve(operators, work=attrs.evolve(operators.work, bytes=left)),
    )


def _group(started: TracedCollective, owners: _Owners) -> str:
    """Finds the group of the variable that a collective moves, else of its block."""
    return owners.of(_variable(started.facts)) or owners.of(started.block or started.facts.layer)


def _variable(facts: CollectiveFacts) -> str:
    return facts.reduced[0] if facts.reduced else facts.variable or ""


# At most so many partial choices go on to the next layer; of more, only the best in each cell.
MOST_PARTIALS = 4096
# The cells along each side of a grid over seconds and bytes.
_CELLS = 48


@attrs.frozen
class LayerCost:
    """The cost of a layer under one choice.

    Collectives that may run beside operators hide behind the operators of all layers. So the
    seconds of a step are the larger of two sums over its layers.

    Args:
        serial: The seconds of its operators, and of its collectives that do not run beside any.
        communication: The seconds of all its collectives.
        bytes: The bytes that its variables take.
    """

    serial: float
    communication: float
    bytes: int


@attrs.frozen
class _PartialChoice:
    """Choices for the first layers."""

    serial: float = 0.0
    communication: float = 0.0
    bytes: int = 0
    before: "_PartialChoice | None" = None
    last: int = 0

    @property
    def seconds(self) -> float:
        """The seconds of these layers."""
        return max(self.serial, self.communication)

    def extended(self, cost: LayerCost, choice: int) -> "_PartialChoice":
        serial, communication = self.serial + cost.serial, self.communication + cost.communication
        return _PartialChoice(serial, communication, self.bytes + cost.bytes, self, choice)

    def choices(self) -> tuple[int, ...]:
        choices: list[int] = []
        partial = self
        while partial.before is not None:
            choices.append(partial.last)
            partial = partial.before
        return tuple(reversed(choices))


def cheapest(layers: Sequence[Sequence[LayerCost]], memory: int) -> tuple[int, ...] | None:
    """Chooses for each layer so that the step is shortest and fits; None if none fits.

    After each layer it keeps the choices that no others beat in serial seconds, in seconds
    of collectives and in bytes. Of very many it keeps some: then the result is close to the best.

    Args:
        layers: The costs of each layer under each choice.
        memory: The bytes for the variables of all layers.

    Example:
        >>> table = [LayerCost(1, 9, 100), LayerCost(2, 1, 50)]
        >>> block = [LayerCost(5, 2, 40), LayerCost(6, 3, 10)]
        >>> cheapest([table, block], 200), cheapest([table, block], 60), cheapest([table], 10)
        ((1, 0), (1, 1), None)
    """
    partials = [_PartialChoice()]
    for costs in layers:
        longer = (
            partial.extended(cost, choice)
            for partial in partials
            for choice, cost in enumerate(costs)
        )
        partials = _prune(_pareto_front(partial for partial in longer if partial.bytes <= memory))
    best = min(partials, key=lambda partial: (partial.seconds, partial.bytes), default=None)
    return None if best is None else best.choices()


def _pareto_front(partials: Iterable[_PartialChoice]) -> list[_PartialChoice]:
    """Keeps the partial choices that no other one equals or beats in seconds and in bytes."""
    front: list[_PartialChoice] = []
    communication: list[float] = []  # of the front by communication and bytes alone: rising
    sizes: list[int] = []  # their bytes, falling
    for partial in sorted(
        partials, key=lambda partial: (partial.serial, partial.communication, partial.bytes)
    ):
        at = bisect_left(communication, partial.communication)
        if (at and sizes[at - 1] <= partial.bytes) or (
            at < len(communication)
            and communication[at] == partial.communication
            and sizes[at] <= partial.bytes
        ):
            continue
        end = at
        while end < len(communication) and sizes[end] >= partial.bytes:
            end += 1
        communication[at:end], sizes[at:end] = [partial.communication], [partial.bytes]
        front.append(partial)
    return front


def _prune(partials: list[_PartialChoice]) -> list[_PartialChoice]:
    """Keeps all of a few; of many, the shortest among those of about equal seconds and bytes."""
    if len(partials) <= MOST_PARTIALS:
        return partials
    most = max(partial.serial for partial in partials), max(partial.bytes for partial in partials)
    best: dict[tuple[int, int], _PartialChoice] = {}
    for partial in partials:
        cell = _cell(partial.serial, most[0]), _cell(partial.bytes, most[1])
        if cell not in best or partial.seconds < best[cell].seconds:
            best[cell] = partial
    return list(best.values())


def _cell(value: float, most: float) -> int:
    return int(_CELLS * value / most) if most else 0
