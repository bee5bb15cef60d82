"""The errors that shardcore raises, for `except` clauses.

docs/reference/errors.md says what each means, and what to do.

Example:
    >>> from shardcore.errors import CheckpointError, ShardcoreError
    >>> issubclass(CheckpointError, ShardcoreError), issubclass(CheckpointError, ValueError)
    (True, True)
"""

from shardcore.domain.errors import (
    ArgumentProblem,
    AuditError,
    CallProblem,
    CheckpointError,
    EnvironmentProblem,
    LayoutError,
    MachineError,
    MeshError,
    OtherRankFailed,
    PluginError,
    PolicyError,
    RankFailed,
    RankMismatchError,
    RuleError,
    ShardcoreError,
    ShardedTensorError,
    StrategyError,
)

__all__ = [
    "ArgumentProblem", "AuditError", "CallProblem", "CheckpointError", "EnvironmentProblem",
    "LayoutError", "MachineError", "MeshError", "OtherRankFailed", "PluginError", "PolicyError",
    "RankFailed", "RankMismatchError", "RuleError", "ShardcoreError", "ShardedTensorError",
    "StrategyError",
]  # fmt: skip
