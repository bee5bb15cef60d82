"""Many small models, each in a fresh Keras session, on one device and over a mesh: one result?"""

import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import keras
import numpy as np
from attrs import field, frozen

import shardcore
from shardcore.binding.keras_private import storage_of
from tests.matrix import counting, strategies
from tests.matrix.forks import Ended, run_all
from tests.matrix.outcomes import Outcome, worst

TOLERANCE = 1e-4


@frozen
class Case:
    """A model and its data.

    Args:
        name: the public class, and after a slash the variant: "Conv1D/causal".
        build: gives the compiled model.
        batch: gives `(x, y)` or `(x, y, sample_weight)` of so many rows.
        rows: the rows of the batch of each training step: they do not all divide by the ranks.
        tolerance: relative to the largest value of each array.
    """

    name: str
    build: Callable[[], Any]
    batch: Callable[[np.random.Generator, int], tuple[Any, ...]]
    rows: tuple[int, ...] = (5, 4, 5)
    tolerance: float = TOLERANCE


@frozen
class Mesh:
    """A distribution for every case.

    Args:
        shape: the shape of the mesh, data axis first; one number is `DataParallel`.
        kernels: the dim of the kernels that is sharded over the model axis: "last" (of vectors
            too), "first", or None.
        axes: the mesh axes that shard it.
    """

    shape: tuple[int, ...]
    kernels: str | None = None
    axes: tuple[str, ...] = ("model",)

    @property
    def name(self) -> str:
        how = f"{self.kernels} dim over {'+'.join(self.axes)}" if self.kernels else "DataParallel"
        return f"{'x'.join(map(str, self.shape))}, {how}"

    @property
    def ranks(self) -> int:
        return int(np.prod(self.shape))


@frozen
class Numbers:
    """The results of a case.

    Args:
        values: arrays by name: logs, predictions and weights.
        shapes: of the variables that a layout map may shard, by path.
    """

    values: dict[str, np.ndarray]
    shapes: dict[str, tuple[int, ...]] = field(repr=False)


Reference = dict[str, Numbers | str]


def one_device(cases: Sequence[Case]) -> Reference:
    """The numbers of plain Keras, or what its error says."""
    found = run_all(_by_name(cases), 1, lambda rank: _attempt, lambda result: False)
    return {n: r.why if isinstance(r, Ended) else r[0] for n, r in found.items()}


def _by_name(cases: Sequence[Case]) -> dict[str, Case]:
    return {case.name: case for case in cases}


def _attempt(case: Case) -> Numbers | str:
    keras.utils.clear_session()
    keras.config.set_dtype_policy("float32")
    try:
        return train(case)
    except Exception as error:  # noqa: BLE001 - whatever a model raises is its outcome
        return story(error)


def over_mesh(cases: Sequence[Case], mesh: Mesh, reference: Reference) -> dict[str, Outcome]:
    """The outcome of each case that one device can run."""
    run = _by_name([case for case in cases if isinstance(reference[case.name], Numbers)])

    def start(rank: int) -> Callable[[Case], Outcome]:
        shardcore.install(strategies.name())
        return lambda case: _compared(case, mesh, reference[case.name])

    found = run_all(run, mesh.ranks, start, lambda outcome: outcome.status == "error")
    return {name: of_ranks(result) for name, result in found.items()}


def of_ranks(result: list[Outcome] | Ended) -> Outcome:
    """The outcome of a case, of those of its ranks."""
    if isinstance(result, Ended):
        return Outcome("error", " ".join([*(each.detail for each in result.noted), result.why]))
    return worst(result)


def _compared(case: Case, mesh: Mesh, reference: Numbers) -> Outcome:
    counting.begin()
    try:
        keras.utils.clear_session()
        keras.config.set_dtype_policy("float32")
        distribute(mesh, reference.shapes)
        numbers = train(case, mesh)
    except Exception as error:  # noqa: BLE001 - whatever a model raises is its outcome
        return Outcome("error", story(error))
    finally:
        keras.distribution.set_distribution(None)
    difference = compare(numbers.values, reference.values, case.tolerance)
    if difference:
        return Outcome("WRONG", difference)
    return counting.right()


def distribute(mesh: Mesh, shapes: dict[str, tuple[int, ...]]) -> None:
    """Set the distribution: kernels of at least as many elements as parts are sharded."""
    if mesh.kernels is None:
        keras.distribution.set_distribution(keras.distribution.DataParallel())
        return
    device_mesh = keras.distribution.DeviceMesh(mesh.shape, ("data", "model"))
    layout_map = keras.distribution.LayoutMap(device_mesh)
    for path, spec in specs(mesh, shapes).items():
        layout_map[path] = spec
    keras.distribution.set_distribution(
        keras.distribution.ModelParallel(layout_map=layout_map, batch_dim_name="data")
    )


def specs(mesh: Mesh, shapes: dict[str, tuple[int, ...]]) -> dict[str, tuple[Any, ...]]:
    """The layout of every variable that the mesh shards."""
    dim = {"last": -1, "first": 0}.get(mesh.kernels or "")
    if dim is None:
        return {}
    parts = mesh.shape[-1] if mesh.axes == ("model",) else mesh.ranks
    found = {}
    for path, shape in shapes.items():
        if len(shape) < (1 if dim else 2) or shape[dim] < parts:
            continue
        spec: list[Any] = [None] * len(shape)
        spec[dim] = mesh.axes if len(mesh.axes) > 1 else mesh.axes[0]
        found[path] = tuple(spec)
    return found


def train(case: Case, mesh: Mesh | None = None) -> Numbers:
    """A training step for each batch, then evaluation and prediction of five rows.

    Steps run eagerly. They come twice at most: a trace of them would never run, and recording takes
    as long as the step. The tables of captured steps compare captured steps with eager ones.
    """
    keras.utils.set_random_seed(7)
    generator = np.random.default_rng(11)
    model = case.build()
    model.jit_compile = False
    values: dict[str, Any] = {}
    for step, rows in enumerate(case.rows):
        with counting.batch(rows):
            logs = model.train_on_batch(*case.batch(generator, rows), return_dict=True)
        values |= {f"step {step} {name}": value for name, value in logs.items()}
    batch = case.batch(generator, case.rows[-1])
    with counting.batch(case.rows[-1]):
        if batch[1] is not None:
            logs = model.test_on_batch(*batch, return_dict=True)
            values |= {f"evaluated {name}": value for name, value in logs.items()}
        outputs = keras.tree.flatten(model.predict_on_batch(batch[0]))
    values |= {f"prediction {number}": output for number, output in enumerate(outputs)}
    variables = [*model.variables, *model.optimizer.variables]
    values |= {
        f"variable {number}": keras.ops.convert_to_numpy(variable)
        for number, variable in enumerate(variables)
    }
    if mesh is not None:
        _check_spans(variables, mesh)
    return Numbers({name: np.asarray(value) for name, value in values.items()}, _shapes(model))


def _shapes(model: Any) -> dict[str, tuple[int, ...]]:
    return {
        v.path: tuple(v.shape)
        for v in model.variables
        if v.dtype in ("float16", "bfloat16", "float32", "float64")
    }


def _check_spans(variables: Sequence[Any], mesh: Mesh) -> None:
    """Every variable is on the whole mesh, and a sharded one is stored in shards."""
    if mesh.ranks == 1:  # there variables are those of plain Keras
        return
    sharded = specs(mesh, {v.path: tuple(v.shape) for v in variables if "seed" not in v.path})
    for variable in variables:
        tensor = variable._value
        assert strategies.is_sharded(tensor), f"{variable.path} is plain"
        assert strategies.mesh_size(tensor) == mesh.ranks
        layout = storage_of(variable).layout
        if variable.path in sharded and layout is not None and mesh.shape[-1] > 1:
            parts = strategies.local(tensor).numel() < tensor.numel()
            assert parts or layout.is_replicated, f"{variable.path} is whole"


def compare(
    values: dict[str, np.ndarray], reference: dict[str, np.ndarray], tolerance: float
) -> str:
    """Describes the first difference, relative to the largest value of the array; "" if equal."""
    if values.keys() != reference.keys():
        return f"other values: {sorted(values.keys() ^ reference.keys())}"
    for name, expected in reference.items():
        value = values[name]
        if value.shape != expected.shape:
            return f"{name}: shape {value.shape}, expected {expected.shape}"
        if value.dtype != expected.dtype:
            return f"{name}: dtype {value.dtype}, expected {expected.dtype}"
        a, b = np.asarray(value, "float64"), np.asarray(expected, "float64")
        if not np.array_equal(np.isfinite(a), np.isfinite(b)):
            return f"{name}: not finite in other places: {a.ravel()[:5]}, expected {b.ravel()[:5]}"
        finite = np.isfinite(b)
        if not finite.any():
            continue
        error, size = np.abs(a - b)[finite].max(), np.abs(b)[finite].max()
        if error > tolerance * max(size, 0.01):  # what is nearly zero everywhere is noise
            return f"{name}: differs by {error:.2e}, values up to {size:.2e}"
    return ""


def story(error: BaseException) -> str:
    """The message of an error, and the line that raised it."""
    frames = traceback.extract_tb(error.__traceback__)
    last = [f"{Path(frame.filename).name}:{frame.lineno} {frame.name}" for frame in frames[-4:]]
    return f"{type(error).__name__}: {str(error)[:1500]} [{' > '.join(last)}]"
