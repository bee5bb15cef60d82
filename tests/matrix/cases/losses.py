"""Every public class of `keras.losses`: with row weights, masks and every reduction."""

from collections.abc import Callable
from functools import partial
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
    REAL,
    WAYS,
    L,
    Make,
    Rng,
    Target,
    adam,
    binary,
    in_ways,
    of_both,
    one_hot,
    reals,
    trained,
)
from tests.matrix.parity import Case

S = keras.losses
LOSS_TARGETS: dict[str, tuple[Make, Target]] = of_both(S) | {
    "BinaryCrossentropy": (lambda: S.BinaryCrossentropy(label_smoothing=0.1), BINARY),
    "BinaryFocalCrossentropy": (lambda: S.BinaryFocalCrossentropy(True), BINARY),
    "CategoricalFocalCrossentropy": (S.CategoricalFocalCrossentropy, ONE_HOT),
    "CategoricalGeneralizedCrossEntropy": (S.CategoricalGeneralizedCrossEntropy, LABELS),
    "Dice": (S.Dice, BINARY),
    "Huber": (lambda: S.Huber(0.5), REAL),
    "LogCosh": (S.LogCosh, REAL),
    "SparseCategoricalFocalCrossentropy": (
        lambda: S.SparseCategoricalFocalCrossentropy(0.3),
        LABELS,
    ),
    "Tversky": (lambda: S.Tversky(0.3, 0.7), BINARY),
}


class Quartic(S.Loss):
    def call(self, y_true, y_pred):
        return keras.ops.mean((y_true - y_pred) ** 4, axis=-1)


def _losses() -> list[Case]:
    def with_loss(make: Make) -> Callable[..., dict[str, Any]]:
        return lambda *_: {"loss": make()}

    found = []
    for name, (make, target) in LOSS_TARGETS.items():
        is_of_all = name in ("Dice", "Tversky")  # they reduce all dims: no mask per step
        found += in_ways(name, with_loss(make), target, WAYS[: 2 if is_of_all else 3])
    for reduction in ("sum", "mean", "mean_with_sample_weight"):
        make = partial(S.MeanSquaredError, reduction=reduction)
        found += in_ways(f"MeanSquaredError/{reduction}", with_loss(make), REAL, WAYS[:3])
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
