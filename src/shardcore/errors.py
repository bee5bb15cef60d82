"""The errors that shardcore raises, for `except` clauses.

docs/reference/errors.md says what each means, and what to do.

Example:
    >>> from shardcore.errors import CheckpointError, ShardcoreError
    >>> issubclass(CheckpointError, ShardcoreError), issubclass(CheckpointError, ValueError)
    (True, True)
"""

from shardcore.domain.errors import (
    AuditError,
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
    StrategyError,
)

__all__ = [
    "AuditError", "CheckpointError", "EnvironmentProblem", "LayoutError", "MachineError",
    "MeshError", "OtherRankFailed", "PluginError", "PolicyError", "RankFailed",
    "RankMismatchError", "RuleError", "ShardcoreError", "StrategyError",
]  # fmt: skip
