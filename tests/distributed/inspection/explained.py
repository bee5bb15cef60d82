"""Small models that are explained."""

import keras
import numpy as np

from tests.distributed.programs import AXES

X = np.random.default_rng(0).normal(size=(8, 16)).astype("float32")
Y = X[:, :8]


def compiled(model):
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    kinds = {"loss": loss if model.inputs[0].dtype == "int32" else "mse"}
    model.compile(keras.optimizers.Adam(0.01), metrics=["accuracy"], run_eagerly=True, **kinds)
    return model


def net():
    layers = keras.layers
    stack = [
        layers.Dense(32, name="up"),
        layers.Dense(32, name="down"),
        layers.Dense(8, name="out"),
    ]
    stack.insert(2, layers.LayerNormalization(name="norm"))
    return compiled(keras.Sequential([keras.Input((16,)), *stack], name="net"))


def distribute_by(mesh, rules):
    layout_map = keras.distribution.LayoutMap(keras.distribution.DeviceMesh(mesh, AXES))
    for key, spec in rules.items():
        layout_map[key] = spec
    return keras.distribution.ModelParallel(layout_map=layout_map, batch_dim_name="data")
