"""The hooks of shardcore. Their docstrings are their documentation.

A package offers plug-ins by an entry point in the group `shardcore`::

    [project.entry-points.shardcore]
    mine = "my_package.my_module"
"""

from collections.abc import Iterable

import pluggy

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
        The entries. A name that another plug-in has taken is an error that names both; a plug-in
        that fails to load or to answer is passed over with a warning.

    Example:
        >>> @hookimpl
        ... def shardcore_strategies():
        ...     return [StrategyEntry("mine", "An example.", open=lambda world: None)]
    """
