"""A small classifier and its targets: what the cases of losses, metrics and optimizers share."""

from collections.abc import Callable, Sequence
from functools import partial
from types import ModuleType
from typing import Any

import keras
import numpy as np

from tests.matrix.parity import Case

L = keras.layers
Rng = np.random.Generator
Make = Callable[[], Any]
FEATURES, CLASSES = 6, 4


def adam() -> Any:
    # A large epsilon: gradients that are zero in theory are noise, which Adam would make steps of.
    return keras.optimizers.Adam(0.01, epsilon=1e-3)


def reals(rng: Rng, *shape: int) -> np.ndarray:
    return rng.normal(size=shape).astype("float32")


def weights(rng: Rng, *shape: int) -> np.ndarray:
    return rng.uniform(0.2, 2.0, shape).astype("float32")


# --- targets: the activation that predicts them, and how they are drawn ---------------------------


def binary(rng: Rng, rows: int) -> np.ndarray:
    return rng.integers(0, 2, (rows, CLASSES)).astype("float32")


def labels(rng: Rng, rows: int) -> np.ndarray:
    return rng.integers(0, CLASSES, rows).astype("int32")


def one_hot(rng: Rng, rows: int) -> np.ndarray:
    return np.eye(CLASSES, dtype="float32")[labels(rng, rows)]


def signs(rng: Rng, rows: int) -> np.ndarray:
    return 2 * binary(rng, rows) - 1


def real_targets(rng: Rng, rows: int) -> np.ndarray:
    return reals(rng, rows, CLASSES)


def positive(rng: Rng, rows: int) -> np.ndarray:
    return rng.uniform(0.1, 2.0, (rows, CLASSES)).astype("float32")


def distributions(rng: Rng, rows: int) -> np.ndarray:
    return rng.dirichlet([1.0] * CLASSES, rows).astype("float32")


Target = tuple[str | None, Callable[[Rng, int], np.ndarray]]
REAL: Target = (None, real_targets)
POSITIVE: Target = ("softplus", positive)
BINARY: Target = ("sigmoid", binary)
ONE_HOT: Target = ("softmax", one_hot)
LABELS: Target = ("softmax", labels)
LOGITS: Target = (None, labels)
SIGNS: Target = ("tanh", signs)
SPREAD: Target = ("softmax", distributions)

# Of the classes that `keras.losses` and `keras.metrics` both have, and that take no arguments.
_OF_BOTH = {
    "CategoricalCrossentropy": ONE_HOT,
    "CategoricalHinge": ONE_HOT,
    "CosineSimilarity": REAL,
    "Hinge": SIGNS,
    "KLDivergence": SPREAD,
    "MeanAbsoluteError": REAL,
    "MeanAbsolutePercentageError": POSITIVE,
    "MeanSquaredError": REAL,
    "MeanSquaredLogarithmicError": POSITIVE,
    "Poisson": POSITIVE,
    "SparseCategoricalCrossentropy": LABELS,
    "SquaredHinge": SIGNS,
}


def of_both(module: ModuleType) -> dict[str, tuple[Callable[..., Any], Target]]:
    """Returns the classes of `keras.losses` or of `keras.metrics` that both have."""
    return {name: (getattr(module, name), target) for name, target in _OF_BOTH.items()}


def classifier(activation: str | None, **options: Any) -> Any:
    x = keras.Input((FEATURES,))
    h = L.Dense(8, activation="tanh", **options)(x)
    return keras.Model(x, L.Dense(CLASSES, activation=activation)(h))


def sequences(activation: str | None) -> Any:
    """Predictions that carry a mask."""
    x = keras.Input((3, FEATURES))
    h = L.Dense(8, activation="tanh", bias_initializer="ones")(L.Masking()(x))
    return keras.Model(x, L.Dense(CLASSES, activation=activation)(h))


def trained(
    name: str,
    compile_with: Callable[[], dict[str, Any]],
    target: Target,
    *,
    weighted: bool = False,
    masked: bool = False,
) -> Case:
    """A classifier compiled so, on that target; over masked sequences, or with row weights."""
    activation, draw = target

    def build() -> Any:
        model = sequences(activation) if masked else classifier(activation)
        model.compile(**{"optimizer": adam(), **compile_with()})
        return model

    def batch(rng: Rng, rows: int) -> tuple[Any, ...]:
        if masked:
            x = reals(rng, rows, 3, FEATURES)
            x[np.arange(rows) % 2 == 0, 2] = 0
            y = np.stack([draw(rng, rows) for _ in range(3)], axis=1)
        else:
            x, y = reals(rng, rows, FEATURES), draw(rng, rows)
        shape = (rows, 3) if masked else (rows,)
        if not weighted:
            return x, y
        # A tensor, as `fit` makes of weights: Keras multiplies it by the mask in place, and metrics
        # see that.
        return x, y, keras.ops.convert_to_tensor(weights(rng, *shape))

    return Case(name, build, batch)


WAYS = ("", "weighted", "masked", "masked weighted")


def in_ways(
    name: str,
    compile_with: Callable[[str], dict[str, Any]],
    target: Target,
    ways: Sequence[str] = WAYS,
) -> list[Case]:
    """A case for each way to give the rows: with weights, with a mask, with both or none."""
    start = f"{name} " if "/" in name else f"{name}/"
    return [
        trained(
            start + way if way else name,
            partial(compile_with, way),
            target,
            weighted="weighted" in way,
            masked="masked" in way,
        )
        for way in ways
    ]
