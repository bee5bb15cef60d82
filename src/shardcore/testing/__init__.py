"""Shipped to plug-in authors: real ranks on this machine, and what they move."""

from contextlib import AbstractContextManager
from typing import Any

from shardcore.testing.ranks import RankFailed, run_ranks

__all__ = ["RankFailed", "count_collectives", "run_ranks"]


def count_collectives() -> AbstractContextManager[Any]:
    """Count the collectives that this thread starts inside.

    Yields:
        An object with `calls` and `operand_bytes`, counters by name ("all_reduce").

    Example:
        >>> with count_collectives() as traffic:
        ...     pass  # model.train_on_batch(x, y)
        >>> dict(traffic.calls)
        {}
    """
    from shardcore.adapters import traffic

    return traffic.count_collectives()
