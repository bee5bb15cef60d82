"""The programs of the training promises: a user's code, with and without a mesh."""

import os
from pathlib import Path
from typing import Any

import keras
import numpy as np

import shardcore
from shardcore import bootstrap
from shardcore.binding.ranks.session import Session, stored_layout
from shardcore.testing.contract.meshes import AXES, Shape

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


def model(dropout: float = 0.2) -> Any:
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


def losses(trained: keras.Model, epochs: int) -> list[float]:
    """Trains for further epochs, and lists their losses."""
    options = {"batch_size": 4, "epochs": epochs, "shuffle": False, "verbose": 0}
    history = trained.fit(X, Y, sample_weight=WEIGHTS, **options).history
    return [float(loss) for loss in history["loss"]]


def values_of(trained: keras.Model) -> dict[str, Any]:
    """Reads all values of the model and its optimizer, by path."""
    variables = [*trained.variables, *trained.optimizer.variables]
    return {variable.path: keras.ops.convert_to_numpy(variable) for variable in variables}


def train(rank: int, strategy: str | None, shape: Shape) -> dict[str, Any]:
    """Runs `fit`, `evaluate` and `predict`; without a strategy in plain Keras."""
    if strategy is not None:
        distribute(strategy, shape)
    trained = model()
    results: dict[str, Any] = {"losses": losses(trained, 2)}
    results["evaluate"] = trained.evaluate(X, Y, 4, sample_weight=WEIGHTS, verbose=0)
    results["predict"] = trained.predict(X, 4, verbose=0)
    results |= values_of(trained)
    if strategy is not None:
        report = shardcore.verify(trained)
        assert report.ok, str(report)
    return results


def gradients(rank: int, strategy: str | None, shape: Shape) -> dict[str, Any]:
    """Computes the gradients of two batches, which add up, without the optimizer.

    Returns:
        By path: the gradient, or on a mesh the part of it that this rank keeps, whether a sum
        over the ranks is pending in it, and which part the storage layout says.
    """
    if strategy is not None:
        distribute(strategy, shape)
    built = model()
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
    storage = stored_layout(variable)  # that of `storage()`, which may differ from the rule
    assert storage is not None, f"variable {variable.path!r} is stored without a layout"
    slices = storage.slices(variable.shape, session.world.position)
    pending = layout is not None and bool(layout.partial)
    return session.strategy.to_local(gradient).numpy(force=True).copy(), pending, slices


def save(rank: int, strategy: str, shape: Shape, folder: Path) -> tuple[Any, Any, Any]:
    """Trains, saves, trains on; then loads the file and trains on."""
    distribute(strategy, shape)
    trained = model(dropout=0)  # Keras does not keep the state of its seeds in a file
    losses(trained, 1)
    trained.save(folder / "mesh.keras")
    weights = values_of(trained)
    further = losses(trained, 1)
    return weights, further, losses(keras.saving.load_model(folder / "mesh.keras"), 1)


def load(rank: int, folder: Path) -> tuple[Any, Any]:
    """Reads the file in plain Keras: its values, and the losses of one more epoch."""
    loaded = keras.saving.load_model(folder / "mesh.keras")
    return values_of(loaded), losses(loaded, 1)
