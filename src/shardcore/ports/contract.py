"""Checks of a strategy while it is used, which name the plug-in that breaks the contract.

`shardcore.testing.StrategyContract` tests the whole contract.
"""

import inspect
from collections.abc import Callable, Iterable
from typing import Any

from shardcore.domain.errors import ShardcoreError, StrategyError
from shardcore.domain.layout import Layout
from shardcore.ports.strategy import NewVariable, Strategy, StrategyEntry, Tensors
from shardcore.ports.types import TensorT
from shardcore.ports.world import World

METHODS = tuple(
    name for kind in (Strategy, Tensors) for name in vars(kind) if not name.startswith("_")
)


def opened(entry: StrategyEntry, world: World) -> Strategy[Any]:
    """Returns the strategy of `entry`, opened on `world`, after a check of its methods.

    Raises:
        StrategyError: If opening fails, or a method is missing or takes other arguments.
        ShardcoreError: If the strategy itself raises one.
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


def check_storage(entry: StrategyEntry, variable: NewVariable, storage: object) -> Layout:
    """Returns `storage`, the strategy's answer for `variable`, if it is a storage layout.

    Raises:
        StrategyError: If it is not.
    """
    if (
        isinstance(storage, Layout)
        and storage.mesh == variable.layout.mesh
        and storage.ndim == len(variable.shape)
        and not storage.partial
    ):
        return storage
    raise StrategyError(
        f"{_who(entry)} wants to keep variable {variable.path!r} of shape {variable.shape} as "
        f"{storage!s}: storage() must give a Layout over mesh {variable.layout.mesh}, of "
        f"{len(variable.shape)} dims and with no partial sum, such as {variable.layout}."
    )


def check_created(
    entry: StrategyEntry,
    variable: str,
    created: TensorT,
    shape: tuple[int, ...],
    local: Callable[[TensorT], TensorT],
    local_shape: tuple[int, ...],
) -> None:
    """Refuses the value `created` for a new variable if its global or local shape differs.

    `local` is the strategy's method, which returns the local shard.
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


def _shape(value: object) -> tuple[int, ...] | str:
    shape = getattr(value, "shape", None)
    return f"none, of type {type(value).__name__}," if shape is None else tuple(shape)


def _check_method(entry: StrategyEntry, strategy: object, name: str) -> None:
    # Without `self`, which the signature of a bound method omits.
    expected = list(inspect.signature(getattr(Strategy, name)).parameters.values())[1:]
    method = getattr(strategy, name, None)
    if not callable(method):
        raise StrategyError(
            f"{_who(entry)} breaks the contract of strategies: {type(strategy).__name__} has no "
            f"method {_call(name, expected)}. docs/how-to/plugins.md lists them all."
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


def _call(name: str, parameters: Iterable[inspect.Parameter]) -> str:
    shown = (each.replace(annotation=inspect.Parameter.empty) for each in parameters)
    return f"{name}({', '.join(map(str, shown))})"
