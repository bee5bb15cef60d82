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
    for each in allocations:
        changes[each.begin] += each.bytes
        if each.end is not None:
            changes[each.end] -= each.bytes
    held, most, at = 0, 0, 0
    for time in sorted(changes):
        held += changes[time]
        if held > most:
            most, at = held, time
    found: dict[Kind, int] = {}
    for each in allocations:
        if each.begin <= at and (each.end is None or each.end > at):
            found[each.kind] = found.get(each.kind, 0) + each.bytes
    return found
