"""The cheapest choice for each layer, by dynamic programming."""

from bisect import bisect_left
from collections.abc import Iterable, Sequence

import attrs

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
        """Returns these choices and one more."""
        serial, communication = self.serial + cost.serial, self.communication + cost.communication
        return _PartialChoice(serial, communication, self.bytes + cost.bytes, self, choice)

    def choices(self) -> tuple[int, ...]:
        """Returns the choice of each layer."""
        choices: list[int] = []
        partial = self
        while partial.before is not None:
            choices.append(partial.last)
            partial = partial.before
        return tuple(reversed(choices))


def cheapest(layers: Sequence[Sequence[LayerCost]], memory: int) -> tuple[int, ...] | None:
    """Returns the choice of each layer with which a step is shortest and fits; None if none fits.

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
    """Returns the partial choices that no other one equals or beats in seconds and in bytes."""
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
    """Returns all of a few; of many, the shortest among those of about equal seconds and bytes."""
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
