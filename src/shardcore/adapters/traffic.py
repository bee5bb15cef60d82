"""Counts what a stretch of code moves between ranks: every collective and its bytes."""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

import attrs

from shardcore.adapters import torch_compat


@attrs.frozen
class Traffic:
    """The collectives of a stretch of code, by name: "all_reduce", "all_gather", ...

    Args:
        calls: How often each was started by this rank.
        operand_bytes: The bytes of this rank's operands, in all.
    """

    calls: Counter[str] = attrs.field(factory=Counter)
    operand_bytes: Counter[str] = attrs.field(factory=Counter)

    def add(self, started: torch_compat.Started) -> None:
        """Count one collective."""
        self.calls[started.name] += 1
        self.operand_bytes[started.name] += started.operand_bytes


@contextmanager
def count_collectives() -> Iterator[Traffic]:
    """Count the collectives of tensors that this thread starts inside.

    Yields:
        The counts, growing.
    """
    traffic = Traffic()
    with torch_compat.CollectiveListener(traffic.add):
        yield traffic
