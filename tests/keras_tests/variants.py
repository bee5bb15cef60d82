"""The ways in which Keras' own tests run: what is installed and sharded on each rank."""

import functools
import importlib
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import keras
import numpy as np
from keras.distribution import DataParallel, DeviceMesh, LayoutMap, ModelParallel, TensorLayout
from keras.src.ops.operation import Operation
from keras.src.testing import test_case

import shardcore

RANKS = 2
SEED = 1337
# The modules of `keras.ops` with functions that get sharded inputs.
OPERATORS = ("core", "einops", "image", "linalg", "math", "nn", "numpy")
# The dim of an array that is sharded, by the array's number in the process and its shape.
Choice = Callable[[int, tuple[int, ...]], int]


class LastDimSharded(ModelParallel):
    """Shards the last dim of each variable over the ranks, if they divide it."""

    def get_variable_layout(self, variable: Any) -> TensorLayout:
        axes: list[str | None] = [None] * len(variable.shape)
        if axes and variable.shape[-1] and variable.shape[-1] % RANKS == 0:
            axes[-1] = "model"
        return TensorLayout(axes, self.device_mesh)


def shard_variables(strategy: str) -> None:
    """Shards every variable on its last dim; all ranks compute all rows."""
    shardcore.install(strategy)
    mesh = DeviceMesh((1, RANKS), ["batch", "model"])
    _keep(LastDimSharded(layout_map=LayoutMap(mesh), batch_dim_name="batch"))


def shard_batches() -> None:
    """Shards the rows of each batch, and replicates the variables."""
    shardcore.install("dtensor")
    _keep(DataParallel(DeviceMesh((RANKS,), ["batch"]), auto_shard_dataset=False))


def install_alone() -> None:
    """Installs shardcore and sets no distribution: each rank runs the tests by itself."""
    shardcore.install("dtensor")


def shard_inputs(choice: Choice | None) -> None:
    """Shards the arrays that operators get on a dim; without a choice their sums are pending."""
    shard_batches()
    numbers = itertools.count()

    def shard(value: Any) -> Any:
        if isinstance(value, list | tuple) and type(value) in (list, tuple):
            return type(value)(map(shard, value))
        if not isinstance(value, np.ndarray) or value.ndim == 0 or value.dtype.kind not in "fiub":
            return value
        if choice is not None:
            return _sharded(value, choice(next(numbers), value.shape))
        return value if value.dtype == bool else _pending(value)

    def with_shards(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def call(*arguments: Any, **named: Any) -> Any:
            named = {name: shard(argument) for name, argument in named.items()}
            return function(*map(shard, arguments), **named)

        return call

    for module, name in _operators():
        setattr(module, name, with_shards(getattr(module, name)))
    Operation.__call__ = with_shards(Operation.__call__)


VARIANTS: dict[str, Callable[[], None]] = {
    "variables sharded": functools.partial(shard_variables, "dtensor"),
    "data parallel": shard_batches,
    "inputs: last dim": functools.partial(shard_inputs, lambda number, shape: len(shape) - 1),
    "inputs: first dim": functools.partial(shard_inputs, lambda number, shape: 0),
    "inputs: a dim each": functools.partial(
        shard_inputs, lambda number, shape: number % len(shape)
    ),
    "inputs: pending sums": functools.partial(shard_inputs, None),
    "manual": functools.partial(shard_variables, "manual"),
    "installed": install_alone,
}


def prepare(variant: str) -> Callable[[], None]:
    """Prepares this rank for a variant; returns what is called before each test."""
    default_rng = np.random.default_rng
    # Tests draw data without a seed; all ranks need the same.
    np.random.default_rng = lambda seed=SEED: default_rng(seed)  # type: ignore[misc, assignment]
    VARIANTS[variant]()
    return functools.partial(keras.utils.set_random_seed, SEED)


def _keep(distribution: DataParallel | ModelParallel) -> None:
    """Sets a distribution, also after each `clear_session` of a test's `setUp`."""
    clear_session = test_case.clear_session

    def clear(*arguments: Any, **named: Any) -> None:
        clear_session(*arguments, **named)
        keras.distribution.set_distribution(distribution)

    test_case.clear_session = clear
    keras.distribution.set_distribution(distribution)


def _operators() -> Iterator[tuple[Any, str]]:
    for part in OPERATORS:
        module = importlib.import_module(f"keras.src.ops.{part}")
        for name, member in list(vars(module).items()):
            is_own = getattr(member, "__module__", "") == module.__name__
            if is_own and callable(member) and not isinstance(member, type) and name[0] != "_":
                yield module, name


def _sharded(value: np.ndarray, dim: int) -> Any:
    axes = ["batch" if at == dim else None for at in range(value.ndim)]
    return shardcore.distribute_tensor(value, tuple(axes))


def _pending(value: np.ndarray) -> Any:
    """Returns the array as a pending sum, no part of which is the array itself."""
    is_finite = value.dtype.kind != "f" or np.isfinite(value).all()
    parts = (2 * value, -value) if is_finite else (value, np.zeros_like(value))
    return keras.ops.sum(_sharded(np.stack(parts), 0), axis=0)
