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


@hookspec
def shardcore_operator_rules() -> Iterable[tuple[object, str]]:  # type: ignore[empty-body]
    """Offer sharding rules for operators of your own.

    Called once at every `shardcore.install()`, when torch is loaded: import the module that
    defines the operators here, not at the top of the plug-in.

    Returns:
        Pairs of an operator and its rule, as `shardcore.operator_rule` takes them. A rule that is
        refused is passed over with a warning: the operator runs on full tensors.

    Example:
        >>> @hookimpl
        ... def shardcore_operator_rules():
        ...     from my_package import operators
        ...     return [(torch.ops.mylib.scale.default, "n k, k -> n k")]
    """
