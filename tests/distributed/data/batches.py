"""Rows, a model that learns from them, and the places that give them."""

import keras
import numpy as np

RNG = np.random.default_rng(0)
X = RNG.normal(size=(14, 5)).astype("float32")
EXTRA = RNG.normal(size=(14, 3)).astype("float32")
Y = RNG.normal(size=(14, 2)).astype("float32")
RULES = {"hidden/kernel": (None, "model")}


def model(inputs="one"):
    keras.utils.set_random_seed(1)
    x, extra = keras.Input((5,), name="x"), keras.Input((3,), name="extra")
    h = x if inputs == "one" else keras.layers.Concatenate()([x, extra])
    h = keras.layers.Dense(4, activation="tanh", name="hidden")(h)
    given = {"one": x, "dict": {"x": x, "extra": extra}, "tuple": (x, extra)}[inputs]
    made = keras.Model(given, keras.layers.Dense(2)(h))
    made.compile(keras.optimizers.SGD(0.1), "mse", metrics=["mae"], jit_compile=False)
    return made


def numbers(history, trained):
    weights = {f"weight {i}": value for i, value in enumerate(trained.get_weights())}
    return {**history.history, **weights}


def batches_of(x, y, weights=None):
    for start in range(0, len(x), 4):
        rows = slice(start, start + 4)
        yield (x[rows], y[rows]) if weights is None else (x[rows], y[rows], weights[rows])
