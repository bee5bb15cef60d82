"""A masked loss changes no tensor outside the step in place."""

import keras
import numpy as np

import shardcore
from shardcore.testing import run_ranks
from tests.matrix import strategies


def train(rank):
    shardcore.install(strategies.name())
    keras.distribution.set_distribution(keras.distribution.DataParallel())
    inputs = keras.Input((3, 4))
    model = keras.Model(inputs, keras.layers.Dense(2)(keras.layers.Masking()(inputs)))
    model.compile("sgd", "mse")
    x, weights = np.ones((4, 3, 4), "float32"), np.ones((4, 3), "float32")
    x[:, 2] = 0
    model.train_on_batch(x, np.ones((4, 3, 2), "float32"), weights)
    return weights


def test_the_sample_weights_of_the_user_are_not_multiplied_by_the_mask():
    for weights in run_ranks(train, 2):
        np.testing.assert_array_equal(weights, np.ones((4, 3)))
