"""A model that is planned, and a call of `shardcore.plan`."""

import keras
import numpy as np
from keras import layers

import shardcore
from shardcore.domain.layouts.mesh import Mesh
from shardcore.testing import run_ranks

MESH = Mesh((2, 4), ("data", "model"))
X = np.ones((4, 8), "float32")


def build():
    """A model whose names Keras makes up, and whose values are drawn."""
    return keras.Sequential(
        [keras.Input((8,)), layers.Dense(32, "relu"), layers.Dropout(0.5), layers.Dense(8)]
    )


def in_a_process(program):
    """Runs `program` in a separate process: the parent computes nothing."""
    return run_ranks(lambda rank: program(), 1, init=False)[0]


def plan(model=build, mesh=MESH, policy="tensor_parallel", **options):
    return shardcore.plan(model, mesh, policy, **{"small": 0, **options})


def use(layout_map, make):
    keras.distribution.set_distribution(
        keras.distribution.ModelParallel(layout_map=layout_map, batch_dim_name="data")
    )
    model = make()
    model.compile("sgd", "mse")
    model.train_on_batch(X, X)
    return model
