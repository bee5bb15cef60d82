"""What of a strategy's contract is checked at work: a plug-in that breaks it is named, early.

The whole contract is tested by `shardcore.testing.StrategyContract`.
"""

import inspect
from collections.abc import Callable
from typing import Any

from shardcore.domain.errors import ShardcoreError, StrategyError
from shardcore.domain.layout import Layout
from shardcore.ports.strategy import NewVariable, Strategy, StrategyEntry, Tensors
from shardcore.ports.world import World

METHODS = tuple(
    name for kind in (Strategy, Tensors) for name in vars(kind) if not name.startswith("_")
)


def opened(entry: StrategyEntry, world: World) -> Strategy:
    """The strategy of `entry` on `world`, which has every method as it is called.

    Raises:
        StrategyError: If it cannot be opened, or a method is missing or takes something else.
        ShardcoreError: What the strategy itself raised of these.
    """
    try:
        strategy = entry.open(world)
    except ShardcoreError:
        raise
    except Exception as error:
        raise StrategyError(
            f"{_who(entry)} could not be opened on mesh {world.mesh}: "
            f"{type(error).__name__}: {error}"
        ) from error
    for name in METHODS:
        _check_method(entry, strategy, name)
    return strategy


def check_storage(entry: StrategyEntry, variable: NewVariable, storage: Any) -> Layout:
    """`storage`, that the strategy gave for `variable`, if it is a layout that can be kept.

    Raises:
        StrategyError: If it is not.
    """
    fits = (
        isinstance(storage, Layout)
        and storage.mesh == variable.layout.mesh
        and storage.ndim == len(variable.shape)
        and not storage.partial
    )
    if not fits:
        raise StrategyError(
            f"{_who(entry)} wants to keep variable {variable.path!r} of shape {variable.shape} as "
            f"{storage!s}: storage() must give a Layout over mesh {variable.layout.mesh}, of "
            f"{len(variable.shape)} dims and with no pending sum, such as {variable.layout}."
        )
    return storage  # type: ignore[no-any-return]


def check_created(
    entry: StrategyEntry,
    variable: str,
    created: Any,
    shape: tuple[int, ...],
    local: Callable[[Any], Any],
    local_shape: tuple[int, ...],
) -> None:
    """Refuses what `create` gave for a variable, by its path, unless it has the global `shape`.

    Likewise the part of it that this rank stores, which the strategy's `local` gives.

    Raises:
        StrategyError: If one of the shapes is another.
    """
    found = _shape(created)
    if found != shape:
        raise StrategyError(
            f"{_who(entry)} made a value of shape {found} for variable {variable!r}: create() must "
            f"give a tensor of the global shape {shape}."
        )
    found = _shape(local(created))
    if found != local_shape:
        raise StrategyError(
            f"{_who(entry)} stores a part of shape {found} of variable {variable!r} on this rank: "
            f"by its layout the part has shape {local_shape}."
        )


def _who(entry: StrategyEntry) -> str:
    return f"Strategy {entry.name!r} of package {entry.package!r}"


def _shape(value: Any) -> tuple[int, ...] | str:
    shape = getattr(value, "shape", None)
    return f"none, of type {type(value).__name__}," if shape is None else tuple(shape)


def _check_method(entry: StrategyEntry, strategy: Any, name: str) -> None:
    # Without `self`, which a bound method does not show.
    expected = list(inspect.signature(getattr(Strategy, name)).parameters.values())[1:]
    method = getattr(strategy, name, None)
    if not callable(method):
        raise StrategyError(
            f"{_who(entry)} breaks the contract of strategies: {type(strategy).__name__} has no "
            f"method {_call(name, expected)}. docs/plugins.md lists them all."
        )
    found = inspect.signature(method)
    required = [each for each in expected if each.default is each.empty]
    optional = {each.name: each.default for each in expected if each.default is not each.empty}
    try:
        found.bind(*required)
        found.bind(*required, **optional)
    except TypeError as error:
        raise StrategyError(
            f"{_who(entry)} breaks the contract of strategies: {type(strategy).__name__} has "
            f"{_call(name, found.parameters.values())}, expected {_call(name, expected)}: {error}."
        ) from error


def _call(name: str, parameters: Any) -> str:
    shown = (each.replace(annotation=inspect.Parameter.empty) for each in parameters)
    return f"{name}({', '.join(map(str, shown))})"
