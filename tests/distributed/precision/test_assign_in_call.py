"""`assign` in the `call` of a layer of a mixed policy, which plain Keras on torch loses."""

import keras
import numpy as np
import pytest

from shardcore.testing import run_ranks
from tests.distributed.programs import distribute


class Counts(keras.layers.Layer):
    """Counts its calls in two variables; one of them is cast under a mixed policy."""

    def build(self, _shape):
        self.cast = self.add_weight(shape=(), initializer="zeros", trainable=False)
        self.kept = self.add_weight(shape=(), initializer="zeros", trainable=False, autocast=False)
        self.scale = self.add_weight(shape=(4,), initializer="ones")

    def call(self, x):
        self.cast.assign(self.cast + 1)
        self.kept.assign(self.kept + 1.0)
        return x * self.scale


def counted(rank, strategy=None):
    if strategy:
        distribute((1, 2), strategy=strategy)
    keras.config.set_dtype_policy("mixed_bfloat16")
    model = keras.Sequential([keras.Input((4,)), Counts()])
    model.compile("sgd", "mse")
    x = np.ones((12, 4), "float32")
    model.fit(x, x, batch_size=2, verbose=0)
    return float(model.layers[0].cast.numpy()), float(model.layers[0].kept.numpy())


@pytest.mark.parametrize("strategy", ["dtensor", "manual"])
def test_it_reaches_the_variable(strategy):
    assert run_ranks(counted, 2, strategy) == [(6, 6)] * 2


def test_plain_keras_keeps_it_only_without_autocast():
    assert run_ranks(counted, 1) == [(0, 6)]  # the documentation says so
