"""The promises under Keras: the numbers of one device, its gradients and its files.

The programs are a user's code, with and without a mesh.
"""

import math
import os
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, ClassVar

import keras
import numpy as np

import shardcore
from shardcore import bootstrap
from shardcore.binding.keras_private.variables import storage_of
from shardcore.binding.ranks.session import Session
from shardcore.testing.contract.meshes import AXES, OnMeshes, Shape
from shardcore.testing.ranks import run_ranks

# Five columns on two ranks, seven rows in batches of four: nothing here divides evenly.
RULES: dict[str, tuple[Any, ...]] = {
    "hidden/kernel": (None, "model"),
    "hidden/bias": ("model",),
    "head/kernel": (("data", "model"), None),
}
_RNG = np.random.default_rng(0)
X = _RNG.normal(size=(7, 4)).astype("float32")
Y = _RNG.normal(size=(7, 3)).astype("float32")
WEIGHTS = _RNG.uniform(0.5, 1.5, 7).astype("float32")


def distribute(strategy: str, shape: Shape) -> None:
    """Sets a mesh and the rules, as a user would."""
    # These programs have few steps, and the promises hold for captured ones too.
    os.environ["SHARDCORE_CAPTURE"] = "at-once"
    shardcore.install(strategy)
    rules = keras.distribution.LayoutMap(keras.distribution.DeviceMesh(shape, AXES))
    for path, spec in RULES.items():
        rules[path] = spec
    keras.distribution.set_distribution(
        keras.distribution.ModelParallel(layout_map=rules, batch_dim_name="data")
    )


def _model(dropout: float = 0.2) -> Any:
    """Builds a small model with batch statistics, random values and a clipped optimizer."""
    keras.utils.set_random_seed(3)
    x = keras.Input((4,))
    h = keras.layers.Dense(5, "tanh", name="hidden")(x)
    h = keras.layers.Dropout(dropout)(keras.layers.BatchNormalization()(h))
    built = keras.Model(x, keras.layers.Dense(3, name="head")(h))
    # A large epsilon: gradients that are zero in theory are noise, which Adam makes steps of. The
    # norm is clipped in some of the steps only, so that gradients of another scale show.
    optimizer = keras.optimizers.Adam(0.05, epsilon=1e-2, global_clipnorm=4.0)
    built.compile(optimizer, "mse", weighted_metrics=["mae"])
    return built


def _losses(trained: keras.Model, epochs: int) -> list[float]:
    options = {"batch_size": 4, "epochs": epochs, "shuffle": False, "verbose": 0}
    history = trained.fit(X, Y, sample_weight=WEIGHTS, **options).history
    return [float(loss) for loss in history["loss"]]


def _values_of(trained: keras.Model) -> dict[str, Any]:
    variables = [*trained.variables, *trained.optimizer.variables]
    return {variable.path: keras.ops.convert_to_numpy(variable) for variable in variables}


def _train(rank: int, strategy: str | None, shape: Shape) -> dict[str, Any]:
    """Runs `fit`, `evaluate` and `predict`; without a strategy in plain Keras."""
    if strategy is not None:
        distribute(strategy, shape)
    trained = _model()
    results: dict[str, Any] = {"losses": _losses(trained, 2)}
    results["evaluate"] = trained.evaluate(X, Y, 4, sample_weight=WEIGHTS, verbose=0)
    results["predict"] = trained.predict(X, 4, verbose=0)
    results |= _values_of(trained)
    if strategy is not None:
        report = shardcore.verify(trained)
        assert report.ok, str(report)
    return results


def _gradients(rank: int, strategy: str | None, shape: Shape) -> dict[str, Any]:
    """Computes the gradients of two batches, which add up, without the optimizer.

    Returns:
        By path: the gradient, or on a mesh the part of it that this rank keeps, whether a sum
        over the ranks is pending in it, and which part the storage layout says.
    """
    if strategy is not None:
        distribute(strategy, shape)
    built = _model()
    x, y = (keras.ops.convert_to_tensor(array) for array in (X, Y))
    if strategy is not None:
        x, y = shardcore.ensure_dtensor_input((x, y))
    for _ in range(2):
        built.compute_loss(x=x, y=y, y_pred=built(x, training=False)).backward()
    if strategy is None:
        return {v.path: v.value.grad.numpy(force=True) for v in built.trainable_variables}
    session = bootstrap.installation().binding.sessions.required()
    return {v.path: _stored_gradient(v, session) for v in built.trainable_variables}


def _stored_gradient(
    variable: keras.Variable, session: Session
) -> tuple[Any, bool, tuple[slice, ...]]:
    gradient = variable.value.grad
    layout = session.strategy.layout(gradient)
    storage = storage_of(variable).layout  # that of `storage()`, which may differ from the rule
    assert storage is not None, f"variable {variable.path!r} is stored without a layout"
    slices = storage.slices(variable.shape, session.world.position)
    pending = layout is not None and bool(layout.partial)
    return session.strategy.to_local(gradient).numpy(force=True).copy(), pending, slices


def _save(rank: int, strategy: str, shape: Shape, folder: Path) -> tuple[Any, Any, Any]:
    """Trains, saves, trains on; then loads the file and trains on."""
    distribute(strategy, shape)
    trained = _model(dropout=0)  # Keras does not keep the state of its seeds in a file
    _losses(trained, 1)
    trained.save(folder / "mesh.keras")
    weights = _values_of(trained)
    further = _losses(trained, 1)
    return weights, further, _losses(keras.saving.load_model(folder / "mesh.keras"), 1)


def _load(rank: int, folder: Path) -> tuple[Any, Any]:
    loaded = keras.saving.load_model(folder / "mesh.keras")
    return _values_of(loaded), _losses(loaded, 1)


@cache
def _one_device(program: Callable[..., object]) -> dict[str, Any]:
    (results,) = run_ranks(program, 1, None, (1, 1))
    assert isinstance(results, dict)
    return results


def _trains_on(shape: Shape) -> Callable[["TrainingPromises"], None]:
    """Builds the test that training on a mesh gives every number of plain Keras, on every rank."""

    def test(self: "TrainingPromises") -> None:
        if self.serves(shape):
            for rank, numbers in enumerate(_on_ranks(_train, self.strategy, shape)):
                self.close(numbers, _one_device(_train), f"rank {rank}")

    return test


class TrainingPromises(OnMeshes):
    """The promises that a user sees."""

    # Relative to numbers of about one; sums over ranks are taken in another order than on one
    # device.
    tolerance: ClassVar[float] = 1e-5

    def close(self, numbers: dict[str, Any], expected: dict[str, Any], where: str) -> None:
        """Checks that all numbers are those of `expected`, within the tolerance."""
        assert numbers.keys() == expected.keys(), (
            f"{where}: {sorted(numbers)}, not {sorted(expected)}"
        )
        near = self.tolerance
        for name, value in numbers.items():
            np.testing.assert_allclose(
                value, expected[name], near, near, err_msg=f"{where}: {name}"
            )

    test_one_rank_gives_the_numbers_of_plain_keras = _trains_on((1, 1))
    test_data_parallel_gives_the_numbers_of_one_device = _trains_on((2, 1))
    test_model_parallel_gives_the_numbers_of_one_device = _trains_on((1, 2))
    test_both_at_once_give_the_numbers_of_one_device = _trains_on((2, 2))

    def test_a_gradient_arrives_in_the_layout_of_its_variable(self) -> None:
        """The gradient is summed over the batch, and adds up as on one device."""
        shape = (2, 2)
        if not self.serves(shape):
            return
        expected = _one_device(_gradients)
        for rank, gradients in enumerate(_on_ranks(_gradients, self.strategy, shape)):
            assert gradients.keys() == expected.keys()
            for path, (part, pending, slices) in gradients.items():
                where = f"rank {rank}: the gradient of {path}"
                assert not pending, (
                    f"{where} has a sum pending: redistribute_gradients() must reduce it"
                )
                self.close({where: part}, {where: expected[path][slices]}, "")

    def test_a_file_is_that_of_one_device(self, tmp_path: Path) -> None:
        """Plain Keras reads what a mesh saved; both resume with the loss that would have come."""
        shape = (1, 2) if self.serves((1, 2)) else (1, 1)
        ranks = _on_ranks(_save, self.strategy, shape, tmp_path)
        ((loaded, plain),) = run_ranks(_load, 1, tmp_path)
        for rank, (weights, further, resumed) in enumerate(ranks):
            self.close(loaded, weights, f"the file, and what rank {rank} kept")
            next_losses = {"on the mesh": resumed, "in plain Keras": plain}
            self.close(next_losses, dict.fromkeys(next_losses, further), f"rank {rank}, next loss")


def _on_ranks(
    program: Callable[..., object], strategy: str, shape: Shape, *args: object
) -> list[Any]:
    return run_ranks(program, math.prod(shape), strategy, shape, *args)
