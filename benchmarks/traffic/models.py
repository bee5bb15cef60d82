"""The models whose traffic is compared, and how each is sharded. Needs neither torch nor JAX.

The models are the layer cases of the test matrix: a layer between two `Dense` layers, a loss and
Adam. shardcore and Keras on JAX build them with the same functions and feed them the same arrays.
"""

import contextlib
import importlib.abc
import importlib.util
import math
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from attrs import frozen

AXES = ("data", "model")
RANKS = 2
ROWS = 4  # of a batch, unless the case has a fixed number: two ranks divide it
Shapes = Mapping[str, tuple[int, ...]]


@frozen
class Mesh:
    """A mesh of two ranks.

    Attributes:
        name: What it is called in tables and in stored results.
        shape: Ranks along the data axis, and along the model axis.
    """

    name: str
    shape: tuple[int, int]

    def __attrs_post_init__(self) -> None:
        assert math.prod(self.shape) == RANKS


DATA_PARALLEL = Mesh("2x1", (2, 1))
MODEL_PARALLEL = Mesh("1x2", (1, 2))
MESHES = {mesh.name: mesh for mesh in (DATA_PARALLEL, MODEL_PARALLEL)}


def sharding_rules(shapes: Shapes, mesh: Mesh) -> dict[str, tuple[str | None, ...]]:
    """Shard every kernel on its last dim over the model axis, as rules of a layout map.

    A kernel is any variable of two dims or more. A last dim that the axis does not divide is left
    alone: JAX refuses uneven shards.

    Example:
        >>> shapes = {"dense/kernel": (4, 6), "dense/bias": (6,), "odd/kernel": (4, 5)}
        >>> sharding_rules(shapes, MODEL_PARALLEL)
        {'^dense/kernel$': (None, 'model')}
        >>> sharding_rules(shapes, DATA_PARALLEL)
        {}
    """
    parts = mesh.shape[1]
    return {
        f"^{re.escape(path)}$": (*[None] * (len(shape) - 1), "model")
        for path, shape in shapes.items()
        if parts > 1 and len(shape) > 1 and shape[-1] % parts == 0
    }


def batch_rows(allowed: tuple[int, ...]) -> int:
    """Choose the rows of the batch among those that a case can take.

    Example:
        >>> batch_rows((5, 4, 5)), batch_rows((5, 5, 5))
        (4, 5)
    """
    return ROWS if ROWS in allowed else allowed[0]


def build(case: Any, mesh: Mesh) -> Any:
    """Build the compiled model of a case, sharded over the mesh.

    The model is built twice: the first build, without a distribution, gives the shapes of the
    variables. Keras counts names from one again after `clear_session`, so the paths agree.
    """
    import keras

    _new_session(keras)
    shapes = {variable.path: tuple(variable.shape) for variable in case.build().variables}
    _new_session(keras)
    layout_map = keras.distribution.LayoutMap(keras.distribution.DeviceMesh(mesh.shape, AXES))
    for path, layout in sharding_rules(shapes, mesh).items():
        layout_map[path] = layout
    distribution = keras.distribution.ModelParallel(layout_map=layout_map, batch_dim_name="data")
    keras.distribution.set_distribution(distribution)
    return case.build()


def batches(case: Any) -> Iterator[tuple[Any, ...]]:
    """Draw batches of one shape without end, the same ones for every backend."""
    import numpy as np

    generator = np.random.default_rng(11)
    while True:
        yield case.batch(generator, batch_rows(case.rows))


def layer_cases() -> dict[str, Any]:
    """Load the layer cases that plain Keras can train on one torch device, by name."""
    from tests.matrix.cases import layers

    found = {case.name: case for case in layers.LAYERS}
    return {name: case for name, case in found.items() if name not in _broken(layers)}


def select(names: Iterable[str], wanted: Iterable[str]) -> list[str]:
    """Select cases by name, or by the name of their layer class.

    Example:
        >>> select(["LSTM", "LSTM/odd", "LSTMCell", "GRU/odd"], ["LSTM", "GRU/odd"])
        ['LSTM', 'LSTM/odd', 'GRU/odd']
        >>> select(["LSTM", "GRU"], [])
        ['LSTM', 'GRU']
    """
    chosen = set(wanted)
    return [n for n in names if not chosen or {n, n.partition("/")[0]} & chosen]


@contextlib.contextmanager
def stand_ins(*packages: str) -> Iterator[None]:
    """Replace packages that are not installed by empty ones while modules are imported.

    The cases of the matrix need Keras and NumPy, but are stored beside code that imports torch and
    shardcore. The environment of Keras on JAX has neither.
    """
    finder = _StandInFinder(packages)
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)
        for name in [each for each in sys.modules if finder.covers(each)]:
            del sys.modules[name]


class _StandIn(ModuleType):
    """A package in which every name is an empty class."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {})


class _StandInFinder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Imports a stand-in for every module of some packages."""

    def __init__(self, packages: tuple[str, ...]) -> None:
        self._packages = packages

    def covers(self, module: str) -> bool:
        return module.partition(".")[0] in self._packages

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> ModuleSpec | None:
        if not self.covers(fullname):
            return None
        return importlib.util.spec_from_loader(fullname, self, is_package=True)

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _StandIn(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """Nothing to run: a stand-in is empty."""


def _broken(module: Any) -> dict[str, str]:
    return dict(module.NOT_ON_ONE_DEVICE)


def _new_session(keras: Any) -> None:
    keras.distribution.set_distribution(None)
    keras.utils.clear_session()
    keras.config.set_dtype_policy("float32")
    keras.utils.set_random_seed(7)
