"""For authors of plug-ins and operators: contracts, tests on real ranks, counted collectives."""

from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

from shardcore.domain.errors import RankFailed
from shardcore.testing.operator_rules import check_operator_rule
from shardcore.testing.ranks import run_ranks

if TYPE_CHECKING:
    from shardcore.adapters.inspection import Traffic
    from shardcore.testing.contract import StrategyContract

__all__ = [
    "RankFailed", "StrategyContract", "check_operator_rule", "count_collectives", "run_ranks",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    if name != "StrategyContract":
        raise AttributeError(f"module 'shardcore.testing' has no attribute {name!r}")
    # Imported here, as it loads torch and Keras.
    from shardcore.testing.contract import StrategyContract

    return StrategyContract


def count_collectives() -> AbstractContextManager["Traffic"]:
    """Counts the collectives that this thread starts inside the `with`.

    A captured step starts other collectives than an eager one. `SHARDCORE_CAPTURE=at-once` captures
    the third step.

    Returns:
        A context of an object with two counters by name ("all_reduce"): `calls`, and
        `operand_bytes`, the bytes of the operands of this rank.

    Example:
        >>> with count_collectives() as traffic:
        ...     pass  # model.train_on_batch(x, y)
        >>> dict(traffic.calls), traffic.operand_bytes["all_reduce"]
        ({}, 0)
    """
    from shardcore.adapters import inspection as traffic

    return traffic.count_collectives()
