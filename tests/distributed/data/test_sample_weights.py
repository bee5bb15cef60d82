"""Sample weights that a model changes in place."""

import keras
import numpy as np
import torch

import shardcore
from shardcore.testing import run_ranks
from tests.distributed.programs import distribute


class SqueezedWeights(keras.Model):
    """Hands its loss a view of the weights, which the mask of the loss is multiplied into."""

    def compute_loss(self, x, y, y_pred, sample_weight, training=True):
        return super().compute_loss(x, y, y_pred, sample_weight[:, 0], training)

    def compute_metrics(self, x, y, y_pred, sample_weight):
        weights = keras.ops.convert_to_tensor(sample_weight)
        return {"weight": keras.ops.sum(weights)}


def test_an_array_of_weights_is_not_changed_through_a_view():
    def program(rank, mesh):
        if mesh:
            distribute(mesh)
        keras.utils.set_random_seed(1)
        x = keras.Input((3,))
        h = keras.layers.Embedding(5, 4, mask_zero=True)(x)
        model = SqueezedWeights(x, keras.layers.Dense(1)(h))
        model.compile("sgd", "mse")
        words = np.array([[1, 2, 0], [3, 0, 0]] * 4)
        weights = np.linspace(0.5, 2.0, 24).reshape(8, 1, 3).astype("float32")
        logs = model.train_on_batch(words, np.ones((8, 3, 1)), weights, return_dict=True)
        return float(logs["weight"]), model.get_weights()

    ((expected, trained),) = run_ranks(program, 1, None)
    for found, weights in run_ranks(program, 2, (2, 1)):
        np.testing.assert_allclose(found, expected, rtol=1e-6)
        for mine, theirs in zip(weights, trained, strict=True):
            np.testing.assert_allclose(mine, theirs, atol=1e-6)


class SumOfWeights(keras.Model):
    """Returns the sum of the weights, after the mask of the loss was multiplied into them."""

    def compute_metrics(self, x, y, y_pred, sample_weight):
        return {"weight": keras.ops.sum(sample_weight)}


def test_a_captured_step_sees_whether_weights_are_an_array():
    """The mask changes a tensor of weights in place, and no array: as in plain Keras."""

    def program(rank, mesh, strategy="dtensor"):
        if mesh:
            distribute(mesh)
        elif strategy == "single":
            shardcore.install("single")
        x = keras.Input((3,))
        h = keras.layers.Embedding(5, 4, mask_zero=True)(x)
        model = SumOfWeights(x, keras.layers.Dense(1)(h))
        model.compile("sgd", "mse")
        words = np.array([[1, 2, 0], [3, 0, 0]] * 4)
        weights = np.linspace(0.5, 2.0, 24).reshape(8, 3).astype("float32")
        batches = [weights] * 4 + [torch.from_numpy(weights.copy()) for _ in range(4)] + [weights]
        targets = np.ones((8, 3, 1), "float32")
        return [float(model.train_on_batch(words, targets, batch)) for batch in batches]

    (expected,) = run_ranks(program, 1, None)
    assert expected[0] != expected[4]
    for sums in (*run_ranks(program, 2, (2, 1)), *run_ranks(program, 1, None, "single")):
        np.testing.assert_allclose(sums, expected, rtol=1e-6)
