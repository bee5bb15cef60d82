"""Unsharded weights that the engine holds for further uses in a step."""

from collections.abc import Hashable, Sequence
from math import inf
from typing import Generic, TypeVar

import attrs

from shardcore.domain.cost.gradients import BUCKET_BYTES

_Weight = TypeVar("_Weight")


@attrs.frozen
class WeightSize:
    """Unsharded weights of a size, of which the latest are held.

    Args:
        most: The bytes of the largest.
        total: The bytes of those that are held.
    """

    most: float
    total: float


# Biases and scales are small beside the kernels, also all of them: they stay until the step ends.
# So what a block all-gathers does not depend on the number of blocks behind it (ADR 49). The total
# is for loops of a user, where no step ends.
SMALL = WeightSize(512 * 1024, 4 * BUCKET_BYTES)
# The steps of a recurrence use one kernel repeatedly.
LARGE = WeightSize(BUCKET_BYTES, BUCKET_BYTES)
PER_USE = (SMALL, LARGE)
PER_STEP = (WeightSize(inf, inf),)


@attrs.define
class LatestWeights(Generic[_Weight]):
    """The latest weights of a size.

    Example:
        >>> latest = LatestWeights(WeightSize(most=8, total=12))
        >>> latest.add("a", "weight a", 8)
        >>> latest.add("b", "weight b", 8)
        >>> latest.find("a"), latest.find("b"), latest.bytes
        (None, 'weight b', 8)
    """

    size: WeightSize
    bytes: int = attrs.field(default=0, init=False)
    # Each with its bytes, the oldest first.
    _held: dict[Hashable, tuple[_Weight, int]] = attrs.field(factory=dict, init=False)

    def find(self, key: Hashable) -> _Weight | None:
        """Looks a weight up; it is the latest from now on."""
        weight_and_bytes = self._held.pop(key, None)
        if weight_and_bytes is None:
            return None
        self._held[key] = weight_and_bytes
        return weight_and_bytes[0]

    def add(self, key: Hashable, weight: _Weight, size: int) -> None:
        """Adds a weight of so many bytes; drops the oldest ones if they are too many."""
        self._held[key] = weight, size
        self.bytes += size
        while self.bytes > self.size.total:
            _, dropped = self._held.pop(next(iter(self._held)))
            self.bytes -= dropped

    def clear(self) -> None:
        """Drops all weights."""
        self._held.clear()
        self.bytes = 0


def size_of(weight: int, sizes: Sequence[WeightSize] = PER_USE) -> WeightSize | None:
    """Finds the size that a weight of so many bytes has; None if it is too large to be held.

    Example:
        >>> size_of(4) == SMALL, size_of(2**20) == LARGE, size_of(2**30)
        (True, True, None)
    """
    return next((size for size in sizes if weight <= size.most), None)
