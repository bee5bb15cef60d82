"""The first convolution of a model: the gradient of its image is not asked for."""

import keras
import numpy as np
import pytest

from shardcore.testing import run_ranks
from tests.distributed.programs import distribute


class Scale(keras.layers.Layer):
    """Scales the channels of an image, as a normalization with given statistics does."""

    def build(self, input_shape):
        self.scale = self.add_weight(shape=(1, 1, 1, 4), name="scale", trainable=False)

    def call(self, x):
        return x * (1 + self.scale)


def losses(mesh):
    if mesh is not None:
        sharded = (None, None, None, "model")
        distribute(mesh, {".*scale": sharded, "conv/kernel": sharded})
    keras.utils.set_random_seed(1)
    x = keras.Input((5, 5, 4))
    model = keras.Model(x, keras.layers.Conv2D(6, 3, name="conv")(Scale(name="s")(x)))
    model.compile("sgd", "mse")
    rows = np.random.default_rng(0).normal(size=(4, 5, 5, 4)).astype("float32")
    return [float(model.train_on_batch(rows, np.ones((4, 3, 3, 6)))) for _ in range(3)]


@pytest.mark.parametrize("mesh", [(2, 1), (1, 2)])
def test_an_image_whose_channels_are_sharded_has_the_losses_of_one_device(mesh):
    (expected,) = run_ranks(lambda rank: losses(None), 1)
    for found in run_ranks(lambda rank: losses(mesh), 2):
        np.testing.assert_allclose(found, expected, rtol=1e-5)
