"""Every public class of `keras.losses`: with row weights, masks and every reduction."""

from collections.abc import Callable
from typing import Any

import keras
import numpy as np

from tests.matrix.cases.classifier import (
    BINARY,
    CLASSES,
    FEATURES,
    LABELS,
    LOGITS,
    ONE_HOT,
    POSITIVE,
    REAL,
    SIGNS,
    SPREAD,
    L,
    Make,
    Rng,
    Target,
    adam,
    binary,
    one_hot,
    reals,
    trained,
)
from tests.matrix.parity import Case

S = keras.losses
LOSS_TARGETS: dict[str, tuple[Make, Target]] = {
    "BinaryCrossentropy": (lambda: S.BinaryCrossentropy(label_smoothing=0.1), BINARY),
    "BinaryFocalCrossentropy": (lambda: S.BinaryFocalCrossentropy(True), BINARY),
    "CategoricalCrossentropy": (S.CategoricalCrossentropy, ONE_HOT),
    "CategoricalFocalCrossentropy": (S.CategoricalFocalCrossentropy, ONE_HOT),
    "CategoricalGeneralizedCrossEntropy": (S.CategoricalGeneralizedCrossEntropy, LABELS),
    "CategoricalHinge": (S.CategoricalHinge, ONE_HOT),
    "CosineSimilarity": (S.CosineSimilarity, REAL),
    "Dice": (S.Dice, BINARY),
    "Hinge": (S.Hinge, SIGNS),
    "Huber": (lambda: S.Huber(0.5), REAL),
    "KLDivergence": (S.KLDivergence, SPREAD),
    "LogCosh": (S.LogCosh, REAL),
    "MeanAbsoluteError": (S.MeanAbsoluteError, REAL),
    "MeanAbsolutePercentageError": (S.MeanAbsolutePercentageError, POSITIVE),
    "MeanSquaredError": (S.MeanSquaredError, REAL),
    "MeanSquaredLogarithmicError": (S.MeanSquaredLogarithmicError, POSITIVE),
    "Poisson": (S.Poisson, POSITIVE),
    "SparseCategoricalCrossentropy": (S.SparseCategoricalCrossentropy, LABELS),
    "SparseCategoricalFocalCrossentropy": (
        lambda: S.SparseCategoricalFocalCrossentropy(0.3),
        LABELS,
    ),
    "SquaredHinge": (S.SquaredHinge, SIGNS),
    "Tversky": (lambda: S.Tversky(0.3, 0.7), BINARY),
}


class Quartic(S.Loss):
    def call(self, y_true, y_pred):
        return keras.ops.mean((y_true - y_pred) ** 4, axis=-1)


def _losses() -> list[Case]:
    def with_loss(make: Make) -> Callable[[], dict[str, Any]]:
        return lambda: {"loss": make()}

    found = []
    for name, (make, target) in LOSS_TARGETS.items():
        found += [
            trained(name, with_loss(make), target),
            trained(f"{name}/weighted", with_loss(make), target, weighted=True),
        ]
        if name not in ("Dice", "Tversky"):  # they reduce all dims: no mask per step
            found.append(trained(f"{name}/masked", with_loss(make), target, masked=True))
    for reduction in ("sum", "mean", "mean_with_sample_weight"):
        make = lambda reduction=reduction: S.MeanSquaredError(reduction=reduction)  # noqa: E731
        note = f"MeanSquaredError/{reduction}"
        found += [
            trained(note, with_loss(make), REAL),
            trained(f"{note} weighted", with_loss(make), REAL, weighted=True),
            trained(f"{note} masked", with_loss(make), REAL, masked=True),
        ]
    return [
        *found,
        trained("Loss/subclass", with_loss(Quartic), REAL, weighted=True),
        trained("BinaryCrossentropy/logits", with_loss(lambda: S.BinaryCrossentropy(True)),
                (None, binary)),
        trained("CategoricalCrossentropy/logits",
                with_loss(lambda: S.CategoricalCrossentropy(True, 0.1)), (None, one_hot)),
        trained("SparseCategoricalCrossentropy/logits",
                with_loss(lambda: S.SparseCategoricalCrossentropy(True)), LOGITS),
        trained("SparseCategoricalCrossentropy/ignored",
                with_loss(lambda: S.SparseCategoricalCrossentropy(True, ignore_class=0)), LOGITS),
        trained("CosineSimilarity/axis", with_loss(lambda: S.CosineSimilarity(axis=0)), REAL),
        trained("Dice/axis", with_loss(lambda: S.Dice(axis=-1)), BINARY),
        trained("Tversky/axis", with_loss(lambda: S.Tversky(axis=-1)), BINARY),
        trained("MeanSquaredError/weighted masked", with_loss(S.MeanSquaredError), REAL,
                masked=True, weighted=True),
        _ctc(), _circle(), _image_dice(),
    ]  # fmt: skip


def _ctc() -> Case:
    def build() -> Any:
        x = keras.Input((8, FEATURES))
        model = keras.Model(x, L.Dense(5)(x))
        model.compile(adam(), S.CTC())
        return model

    return Case(
        "CTC",
        build,
        lambda rng, rows: (reals(rng, rows, 8, FEATURES), rng.integers(1, 5, (rows, 3))),
    )


def _circle() -> Case:
    def build() -> Any:
        x = keras.Input((FEATURES,))
        model = keras.Model(x, L.UnitNormalization()(L.Dense(CLASSES)(x)))
        model.compile(adam(), S.Circle(gamma=4.0))
        return model

    return Case(
        "Circle", build, lambda rng, rows: (reals(rng, rows, FEATURES), np.arange(rows) % 2)
    )


def _image_dice() -> Case:
    def build() -> Any:
        x = keras.Input((4, 4, 3))
        model = keras.Model(x, L.Conv2D(2, 3, padding="same", activation="sigmoid")(x))
        model.compile(adam(), S.Dice(axis=(1, 2, 3)))
        return model

    def batch(rng: Rng, rows: int) -> tuple[Any, ...]:
        return reals(rng, rows, 4, 4, 3), rng.integers(0, 2, (rows, 4, 4, 2)).astype("float32")

    return Case("Dice/image", build, batch)


LOSSES = _losses()
