"""A model of which checkpoints are saved, on any mesh."""

import keras
import numpy as np
from keras import layers

import shardcore

RNG = np.random.default_rng(0)
X = RNG.normal(size=(24, 6)).astype("float32")
Y = RNG.integers(0, 4, 24)


def distribute(shape, strategy="dtensor", rules=None):
    shardcore.install(strategy)
    mesh = keras.distribution.DeviceMesh(shape, ("data", "model"))
    layout_map = keras.distribution.LayoutMap(mesh)
    for key, spec in (rules or {}).items():
        layout_map[key] = spec
    keras.distribution.set_distribution(
        keras.distribution.ModelParallel(layout_map=layout_map, batch_dim_name="data")
    )


COLUMNS = {".*hidden.*kernel": (None, "model"), ".*digits.*kernel": ("model", None)}


def build():
    keras.utils.set_random_seed(3)
    model = keras.Sequential(
        [
            keras.Input((6,)),
            layers.Dense(10, "relu", name="hidden"),
            layers.BatchNormalization(),
            layers.Dropout(0.3),
            layers.Dense(4, name="digits"),
        ]
    )
    rate = keras.optimizers.schedules.ExponentialDecay(0.05, 3, 0.5)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(rate), loss, metrics=["accuracy"], jit_compile=False)
    return model
