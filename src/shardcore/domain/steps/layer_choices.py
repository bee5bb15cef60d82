"""The cheapest choice for each layer, by dynamic programming."""

from bisect import bisect_left
from collections.abc import Iterable, Sequence

import attrs

# The number of partial choices that are kept; of more only the best of those that are about alike.
KEPT = 4096
# Two partial choices are about alike if they differ by less than this part of the range.
_PARTS = 48


@attrs.frozen
class LayerCost:
    """The cost of a layer under one choice.

    Collectives that may run beside operators hide behind the operators of all layers. So the
    seconds of a step are the larger of two sums over its layers.

    Args:
        alone: The seconds of its operators, and of its collectives that do not run beside any.
        moved: The seconds of all its collectives.
        bytes: The bytes that its variables take.
    """

    alone: float
    moved: float
    bytes: int


@attrs.frozen
class _Partial:
    """Choices for the first layers."""

    alone: float = 0.0
    moved: float = 0.0
    bytes: int = 0
    before: "_Partial | None" = None
    last: int = 0

    @property
    def seconds(self) -> float:
        """The seconds of these layers."""
        return max(self.alone, self.moved)

    def with_(self, cost: LayerCost, choice: int) -> "_Partial":
        """Returns these choices and one more."""
        alone, moved = self.alone + cost.alone, self.moved + cost.moved
        return _Partial(alone, moved, self.bytes + cost.bytes, self, choice)

    def choices(self) -> tuple[int, ...]:
        """Returns the choice of each layer."""
        found: list[int] = []
        each = self
        while each.before is not None:
            found.append(each.last)
            each = each.before
        return tuple(reversed(found))


def cheapest(layers: Sequence[Sequence[LayerCost]], memory: int) -> tuple[int, ...] | None:
    """Returns the choice of each layer with which a step is shortest and fits; None if none fits.

    After each layer it keeps the choices that no others beat in seconds alone, in seconds of
    collectives and in bytes. Of very many it keeps some: then the result is close to the best.

    Args:
        layers: The costs of each layer under each choice.
        memory: The bytes for the variables of all layers.

    Example:
        >>> table = [LayerCost(1, 9, 100), LayerCost(2, 1, 50)]
        >>> block = [LayerCost(5, 2, 40), LayerCost(6, 3, 10)]
        >>> cheapest([table, block], 200), cheapest([table, block], 60), cheapest([table], 10)
        ((1, 0), (1, 1), None)
    """
    found = [_Partial()]
    for costs in layers:
        longer = (each.with_(cost, choice) for each in found for choice, cost in enumerate(costs))
        found = _few(_unbeaten(each for each in longer if each.bytes <= memory))
    best = min(found, key=lambda each: (each.seconds, each.bytes), default=None)
    return None if best is None else best.choices()


def _unbeaten(partials: Iterable[_Partial]) -> list[_Partial]:
    """Returns the partial choices that no other one equals or beats in seconds and in bytes."""
    found: list[_Partial] = []
    moved: list[float] = []  # of those found, which no other beats in both: rising
    sizes: list[int] = []  # theirs, falling
    for each in sorted(partials, key=lambda one: (one.alone, one.moved, one.bytes)):
        at = bisect_left(moved, each.moved)
        if (at and sizes[at - 1] <= each.bytes) or (
            at < len(moved) and moved[at] == each.moved and sizes[at] <= each.bytes
        ):
            continue
        end = at
        while end < len(moved) and sizes[end] >= each.bytes:
            end += 1
        moved[at:end], sizes[at:end] = [each.moved], [each.bytes]
        found.append(each)
    return found


def _few(partials: list[_Partial]) -> list[_Partial]:
    """Returns all, or the shortest of those that are about alike in seconds alone and in bytes."""
    if len(partials) <= KEPT:
        return partials
    most = max(each.alone for each in partials), max(each.bytes for each in partials)
    best: dict[tuple[int, int], _Partial] = {}
    for each in partials:
        cell = _part(each.alone, most[0]), _part(each.bytes, most[1])
        if cell not in best or each.seconds < best[cell].seconds:
            best[cell] = each
    return list(best.values())


def _part(value: float, most: float) -> int:
    return int(_PARTS * value / most) if most else 0
