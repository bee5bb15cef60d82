"""Unsharded weights that the engine holds for further uses in a step."""

from collections.abc import Sequence
from math import inf

import attrs

from shardcore.domain.steps.gradient_buckets import BUCKET_BYTES


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
# So what a block all-gathers does not depend on the number of blocks behind it. The total is for
# loops of a user, where no step ends.
SMALL = WeightSize(512 * 1024, 4 * BUCKET_BYTES)
# The steps of a recurrence use one kernel repeatedly.
LARGE = WeightSize(BUCKET_BYTES, BUCKET_BYTES)
PER_USE = (SMALL, LARGE)
PER_STEP = (WeightSize(inf, inf),)


def size_of(weight: int, sizes: Sequence[WeightSize] = PER_USE) -> WeightSize | None:
    """Returns the size that a weight of so many bytes has; None if it is too large to be held.

    Example:
        >>> size_of(4) == SMALL, size_of(2**20) == LARGE, size_of(2**30)
        (True, True, None)
    """
    return next((each for each in sizes if weight <= each.most), None)
