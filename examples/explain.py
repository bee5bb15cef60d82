"""Explains the collectives of a step, and a rule that makes it move too much.

torchrun --nproc_per_node=4 examples/explain.py step.svg
"""

import os
import sys

os.environ["KERAS_BACKEND"] = "torch"  # before Keras is imported
import keras
import numpy as np
from keras import layers

import shardcore

RULES = {
    "up/kernel": (None, "model"),
    "up/bias": ("model",),
    "down/kernel": (None, "model"),  # as the kernel before it: the step gathers what is between
    "down/bias": ("model",),
}


def distribute(rules):
    """Set the distribution of two mesh axes, by these rules."""
    ranks = keras.distribution.get_device_count()
    mesh = keras.distribution.DeviceMesh((ranks // 2, 2), ("data", "model"))
    layout_map = keras.distribution.LayoutMap(mesh)
    for key, spec in rules.items():
        layout_map[key] = spec
    keras.distribution.set_distribution(
        keras.distribution.ModelParallel(layout_map=layout_map, batch_dim_name="data")
    )


def build():
    """A block with a residual, and a classifier."""
    x = keras.Input((64,))
    h = layers.Dense(256, activation="gelu", name="up")(x)
    h = layers.Dense(64, name="down")(h)
    h = layers.LayerNormalization(name="norm")(x + h)
    model = keras.Model(x, layers.Dense(10, name="classes")(h), name="net")
    model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return model


def main(path):
    """Print the explanation, and save its picture."""
    shardcore.install()
    distribute(RULES)
    random = np.random.default_rng(0)
    batch = random.normal(size=(32, 64)).astype("float32"), random.integers(0, 10, 32)
    explanation = shardcore.explain(build(), batch)
    if explanation.rank == 0:
        print(explanation)
        explanation.save(path)
    return explanation


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "step.svg")
