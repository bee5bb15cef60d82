"""The memory of a step: what was allocated when, and what is held at the highest point."""

from collections import Counter
from collections.abc import Collection
from typing import Literal, TypeAlias

import attrs

Kind: TypeAlias = Literal[
    "variables", "optimizer", "batch", "gradients", "activations", "collectives"
]


@attrs.frozen
class Allocation:
    """A piece of memory.

    Args:
        kind: What it is for.
        bytes: Its size.
        begin: The time from which it is held, in any unit.
        end: The time from which it is free, None if it is held to the end.
    """

    kind: Kind
    bytes: int
    begin: int
    end: int | None = None


def highest(allocations: Collection[Allocation]) -> dict[Kind, int]:
    """Returns the bytes by kind at the first time at which most bytes are held.

    Example:
        >>> held = [Allocation("variables", 8, 0), Allocation("activations", 6, 1, 3)]
        >>> highest([*held, Allocation("gradients", 4, 2), Allocation("activations", 5, 3)])
        {'variables': 8, 'activations': 6, 'gradients': 4}
    """
    changes: Counter[int] = Counter()
    for allocation in allocations:
        changes[allocation.begin] += allocation.bytes
        if allocation.end is not None:
            changes[allocation.end] -= allocation.bytes
    held, most, at = 0, 0, 0
    for time in sorted(changes):
        held += changes[time]
        if held > most:
            most, at = held, time
    sizes: dict[Kind, int] = {}
    for allocation in allocations:
        if allocation.begin <= at and (allocation.end is None or allocation.end > at):
            sizes[allocation.kind] = sizes.get(allocation.kind, 0) + allocation.bytes
    return sizes
