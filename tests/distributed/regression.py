"""A small regression."""

import keras
import numpy as np

X = np.random.default_rng(0).normal(size=(16, 4)).astype("float32")
Y = X.sum(1, keepdims=True)
KERNEL = {".*hidden/kernel": (None, "model")}


def build(dropout=0.0, seed=1):
    keras.utils.set_random_seed(seed)
    layers = keras.layers
    model = keras.Sequential(
        [
            keras.Input((4,)),
            layers.Dense(8, name="hidden"),
            layers.Dropout(dropout),
            layers.Dense(1, name="head"),
        ]
    )
    model.compile(keras.optimizers.SGD(0.1), "mse")
    return model


def fit(model, **options):
    return model.fit(
        X, Y, **{"batch_size": 8, "epochs": 2, "shuffle": False, "verbose": 0, **options}
    )
