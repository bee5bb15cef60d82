"""The models of `keras.applications`, the smallest of each family, on small images.

Keras has no NASNet on torch.
"""

from collections.abc import Callable
from typing import Any

import keras

from tests.matrix.cases.classifier import CLASSES, Rng, labels, reals
from tests.matrix.parity import Case

# The side of an image. Some families take no smaller one, nor do their poolings.
SIDES = {
    "ConvNeXtTiny": 32,
    "DenseNet121": 32,
    "EfficientNetB0": 32,
    "EfficientNetV2B0": 32,
    "InceptionResNetV2": 75,
    "InceptionV3": 75,
    "MobileNet": 32,
    "MobileNetV2": 32,
    "MobileNetV3Small": 32,
    "ResNet50": 32,
    "ResNet50V2": 32,
    "VGG16": 32,
    "Xception": 71,
}


def _case(name: str, side: int) -> Case:
    def build() -> Any:
        make: Callable[..., Any] = getattr(keras.applications, name)
        model = make(weights=None, input_shape=(side, side, 3), classes=CLASSES)
        optimizer = keras.optimizers.SGD(0.01, momentum=0.9)
        model.compile(optimizer, "sparse_categorical_crossentropy", metrics=["accuracy"])
        return model

    def batch(rng: Rng, rows: int) -> tuple[Any, ...]:
        return reals(rng, rows, side, side, 3), labels(rng, rows)

    return Case(name, build, batch, rows=(4, 5))


APPLICATIONS = [_case(*each) for each in SIDES.items()]
