"""Shipped to plug-in authors: the contract of strategies, real ranks, and what they move."""

from typing import TYPE_CHECKING, Any

from shardcore.testing.ranks import RankFailed, run_ranks

if TYPE_CHECKING:
    from shardcore.adapters.traffic import count_collectives
    from shardcore.testing.contract import StrategyContract

__all__ = ["RankFailed", "StrategyContract", "count_collectives", "run_ranks"]


def __getattr__(name: str) -> Any:
    # Imported here, as they load torch and Keras.
    if name == "count_collectives":
        from shardcore.adapters.traffic import count_collectives

        return count_collectives
    if name == "StrategyContract":
        from shardcore.testing.contract import StrategyContract

        return StrategyContract
    raise AttributeError(f"module 'shardcore.testing' has no attribute {name!r}")
