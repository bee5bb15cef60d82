"""A small model under strategy `manual`, and the collectives of its step."""

import keras
import numpy as np
import torch

import shardcore
from shardcore.adapters.engine.engine import UnshardedWeights
from shardcore.domain.engine.held_weights import WeightSize
from shardcore.testing import count_collectives

ROWS = np.random.default_rng(0).normal(size=(12, 6)).astype("float32")
TARGETS = np.random.default_rng(1).normal(size=(12, 3)).astype("float32")


def distribute(shape, rules, strategy="manual", **options):
    shardcore.install(strategy, **options)
    mesh = keras.distribution.DeviceMesh(shape, ("data", "model"))
    layout_map = keras.distribution.LayoutMap(mesh)
    for path, spec in rules.items():
        layout_map[path] = spec
    keras.distribution.set_distribution(
        keras.distribution.ModelParallel(layout_map=layout_map, batch_dim_name="data")
    )


def perceptron():
    keras.utils.set_random_seed(3)
    layers = [keras.layers.Dense(8, activation="tanh"), keras.layers.Dense(3)]
    model = keras.Sequential([keras.Input((6,)), *layers], name="net")
    model.compile("adam", "mse")
    return model


def engine_of(model):
    return model.trainable_variables[0]._value.engine


def hold(model, held):
    """Lets the engine of a model hold `held` bytes of all-gathered weights."""
    engine_of(model).unsharded = UnshardedWeights((WeightSize(held, held),))


def calls_of_a_step(rank, shape, rules, options, held=None):
    """The collectives of a step that keeps up to `held` bytes of all-gathered weights.

    The optimizer is left out.
    """
    distribute(shape, rules, **options)
    model = perceptron()
    model.train_on_batch(ROWS, TARGETS)
    if held is not None:
        hold(model, held)
    model.zero_grad()
    with count_collectives() as traffic:
        x, y = (torch.tensor(each) for each in (ROWS, TARGETS))
        rows = shardcore.distribute_tensor(x, ("data", None))
        wanted = shardcore.distribute_tensor(y, ("data", None))
        loss = torch.mean((model(rows) - wanted) ** 2)
        loss.backward()
    return dict(traffic.calls), dict(traffic.operand_bytes)


KERNEL = 4 * 8 * 3  # the bytes of the kernel of "dense_1"
