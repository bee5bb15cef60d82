"""The hooks of shardcore. Their docstrings are their documentation.

A package offers plug-ins by an entry point in the group `shardcore`::

    [project.entry-points.shardcore]
    mine = "my_package.my_module"
"""

from collections.abc import Iterable

import pluggy

from shardcore.ports.policy import PolicyEntry
from shardcore.ports.strategy import StrategyEntry

PROJECT = "shardcore"

hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)


@hookspec
def shardcore_strategies() -> Iterable[StrategyEntry]:  # type: ignore[empty-body]
    """Offer strategies.

    Called once at every `shardcore.install()`. It must be quick and must not import torch: an
    entry imports what it needs when it is opened.

    Returns:
        The entries. A name of shardcore's own stays with it, and one that two packages take is
        refused: a warning names both. A plug-in that fails is passed over with a warning.

    Example:
        >>> @hookimpl
        ... def shardcore_strategies():
        ...     return [StrategyEntry("mine", "An example.", open=lambda world: None)]
    """


@hookspec
def shardcore_policies() -> Iterable[PolicyEntry]:  # type: ignore[empty-body]
    """Offer policies, which choose the layout of each variable.

    Called once at every `shardcore.plan()`. It must be quick and must not import torch or Keras:
    a policy is a pure function of a model's facts and a mesh.

    Returns:
        The entries. As for strategies, a name that is taken is refused with a warning, and a
        plug-in that fails is passed over with a warning.

    Example:
        >>> @hookimpl
        ... def shardcore_policies():
        ...     return [PolicyEntry("mine", "Everything replicated.", plan=lambda model, mesh: {})]
    """
