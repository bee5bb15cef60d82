"""Converts collectives into the bytes that one rank sends, under ring algorithms."""

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

from attrs import field, frozen


@frozen
class Traffic:
    """The bytes and calls that one rank sends in a training step.

    Attributes:
        sent: Bytes, of the rank that sends most.
        calls: Collectives by kind: "all_reduce".
        at_least: Whether a loop of unknown length, counted once, holds some of them.
    """

    sent: float = 0.0
    calls: dict[str, int] = field(factory=dict)
    at_least: bool = False

    @property
    def collectives(self) -> int:
        """Count the collectives of all kinds."""
        return sum(self.calls.values())


def ring_bytes(kind: str, operand: float, ranks: int) -> float:
    """Compute what each of so many ranks sends in a collective.

    Args:
        kind: Of the collective: "all_gather".
        operand: Bytes of the operand of one rank. Of an all-gather that is its shard.
        ranks: How many take part.

    Example:
        >>> ring_bytes("all_reduce", 96, 2), ring_bytes("all_reduce", 96, 4)
        (96.0, 144.0)
        >>> ring_bytes("all_gather", 24, 4), ring_bytes("reduce_scatter", 96, 4)
        (72.0, 72.0)
    """
    share, operand = (ranks - 1) / ranks, float(operand)
    if kind == "all_reduce":  # a reduce-scatter and an all-gather
        return 2 * share * operand
    if kind == "all_gather":  # every other rank gets the shard
        return (ranks - 1) * operand
    if kind in ("reduce_scatter", "all_to_all"):
        return share * operand
    if kind in ("broadcast", "permute"):  # along the ring: each sends the operand on once
        return operand if ranks > 1 else 0.0
    raise ValueError(f"no formula for the collective {kind!r}")


def of_counts(counts: Iterable[tuple[Mapping[str, int], Mapping[str, int]]], ranks: int) -> Traffic:
    """Convert what `shardcore.testing.count_collectives` counted on each rank.

    Args:
        counts: Of each rank: calls and operand bytes, by kind.
        ranks: In the group of every collective.

    Example:
        >>> counted = ({"all_reduce": 2, "all_gather": 1}, {"all_reduce": 100, "all_gather": 8})
        >>> of_counts([counted], 2)
        Traffic(sent=108.0, calls={'all_gather': 1, 'all_reduce': 2}, at_least=False)
    """
    sent, calls = 0.0, Counter[str]()
    for called, operands in counts:
        each = sum(ring_bytes(kind, size, ranks) for kind, size in operands.items())
        sent, calls = max(sent, each), calls | Counter(called)
    return Traffic(float(sent), dict(sorted(calls.items())))


def as_json(traffic: Traffic) -> dict[str, Any]:
    """Write a traffic as plain data.

    Example:
        >>> as_json(Traffic(96.0, {"all_reduce": 2}))
        {'sent': 96, 'calls': {'all_reduce': 2}}
    """
    whole = int(traffic.sent) if traffic.sent == int(traffic.sent) else traffic.sent
    fields = {"sent": whole, "calls": traffic.calls}
    return {**fields, "at_least": True} if traffic.at_least else fields


def from_json(fields: Mapping[str, Any]) -> Traffic:
    """Read what `as_json` wrote."""
    return Traffic(float(fields["sent"]), dict(fields["calls"]), fields.get("at_least", False))
