"""Shipped to plug-in authors: the contract of strategies, real ranks, and what they move."""

from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

from shardcore.testing.ranks import RankFailed, run_ranks

if TYPE_CHECKING:
    from shardcore.testing.contract import StrategyContract

__all__ = ["RankFailed", "StrategyContract", "count_collectives", "run_ranks"]


def __getattr__(name: str) -> Any:
    if name != "StrategyContract":
        raise AttributeError(f"module 'shardcore.testing' has no attribute {name!r}")
    # Imported here, as it loads torch and Keras.
    from shardcore.testing.contract import StrategyContract

    return StrategyContract


def count_collectives() -> AbstractContextManager[Any]:
    """Counts the collectives that this thread starts inside.

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
