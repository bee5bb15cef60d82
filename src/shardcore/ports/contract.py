"""Checks of a strategy while it is used, which name the plug-in that breaks the contract.

`shardcore.testing.StrategyContract` tests the whole contract.
"""

import inspect
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

from shardcore.domain.errors import ShardcoreError, StrategyError, describe_error
from shardcore.domain.layouts.layout import Layout
from shardcore.ports.strategy import NewVariable, Strategy, StrategyEntry, Tensors
from shardcore.ports.types import TensorT
from shardcore.ports.world import World

T = TypeVar("T")

METHODS = tuple(
    name for kind in (Strategy, Tensors) for name in vars(kind) if not name.startswith("_")
)


def open_strategy(entry: StrategyEntry, world: World) -> Strategy[Any]:
    """Opens the strategy of `entry` on `world`, and checks its methods.

    Raises:
        StrategyError: If opening fails, or a method is missing or takes other arguments.
        ShardcoreError: If the strategy itself raises one.
    """
    strategy = _call_strategy(entry, f"open() on mesh {world.mesh}", lambda: entry.open(world))
    for name in METHODS:
        _check_method(entry, strategy, name)
    return strategy


def storage_layout(entry: StrategyEntry, strategy: Strategy[Any], variable: NewVariable) -> Layout:
    """Asks the strategy for the storage layout of `variable`, and checks it.

    Raises:
        StrategyError: If it chooses none that fits, or fails.
    """
    what = f"variable {variable.path!r} of shape {variable.shape}"
    chosen: object = _call_strategy(
        entry, f"storage() of {what}", lambda: strategy.storage(variable)
    )
    if (
        isinstance(chosen, Layout)
        and chosen.mesh == variable.layout.mesh
        and chosen.ndim == len(variable.shape)
        and not chosen.partial
    ):
        return chosen
    raise StrategyError(
        f"{_name_of(entry)} wants to keep {what} as "
        f"{chosen!s}: storage() must give a Layout over mesh {variable.layout.mesh}, of "
        f"{len(variable.shape)} dims and with no partial sum, such as {variable.layout}."
    )


def create_tensor(
    entry: StrategyEntry,
    strategy: Strategy[TensorT],
    value: TensorT,
    storage: Layout,
    variable: NewVariable,
    position: int,
) -> TensorT:
    """Has the strategy create the value of `variable`, and checks its global and local shape.

    Raises:
        StrategyError: If its global or local shape differs from that of the variable, or the
            strategy fails.
    """
    what = f"create() of variable {variable.path!r}"
    tensor = _call_strategy(entry, what, lambda: strategy.create(value, storage, variable))
    shape = _shape(tensor)
    if shape != variable.shape:
        raise StrategyError(
            f"{_name_of(entry)} made a value of shape {shape} for variable {variable.path!r}: "
            f"create() must give a tensor of the global shape {variable.shape}.",
            name=variable.path,
        )
    shape, expected = (
        _shape(strategy.to_local(tensor)),
        storage.local_shape(variable.shape, position),
    )
    if shape != expected:
        raise StrategyError(
            f"{_name_of(entry)} stores a part of shape {shape} of variable {variable.path!r} on "
            f"this rank: by its layout the part has shape {expected}.",
            name=variable.path,
        )
    return tensor


def join_parts(
    entry: StrategyEntry,
    strategy: Strategy[TensorT],
    part: TensorT,
    layout: Layout,
    shape: tuple[int, ...],
) -> TensorT:
    """Has the strategy make one tensor of the ranks' parts, and checks its global shape.

    Raises:
        StrategyError: If it has another shape, or the strategy fails.
    """
    what = f"from_local() of a part of shape {_shape(part)}"
    tensor = _call_strategy(entry, what, lambda: strategy.from_local(part, layout, shape))
    joined_shape = _shape(tensor)
    if joined_shape != shape:
        raise StrategyError(
            f"{_name_of(entry)} joined parts to a value of shape {joined_shape}: from_local() must "
            f"give a tensor of the global shape {shape}."
        )
    return tensor


def _call_strategy(entry: StrategyEntry, what: str, call: Callable[[], T]) -> T:
    """Calls a method of the strategy, and returns its result; an error names the package."""
    try:
        return call()
    except (ShardcoreError, KeyboardInterrupt):
        raise
    except BaseException as error:  # SystemExit too: it is not the program's
        raise StrategyError(f"{_name_of(entry)}: {what}: {describe_error(error)}") from error


def _name_of(entry: StrategyEntry) -> str:
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
            f"{_name_of(entry)} breaks the contract of strategies: {type(strategy).__name__} has "
            f"no method {_call_text(name, expected)}. docs/how-to/plugins.md lists them all."
        )
    signature = inspect.signature(method)
    required = [parameter for parameter in expected if parameter.default is parameter.empty]
    optional = {
        parameter.name: parameter.default
        for parameter in expected
        if parameter.default is not parameter.empty
    }
    try:
        signature.bind(*required)
        signature.bind(*required, **optional)
    except TypeError as error:
        raise StrategyError(
            f"{_name_of(entry)} breaks the contract of strategies: {type(strategy).__name__} has "
            f"{_call_text(name, signature.parameters.values())}, expected "
            f"{_call_text(name, expected)}: {error}."
        ) from error


def _call_text(name: str, parameters: Iterable[inspect.Parameter]) -> str:
    shown = (parameter.replace(annotation=inspect.Parameter.empty) for parameter in parameters)
    return f"{name}({', '.join(map(str, shown))})"
