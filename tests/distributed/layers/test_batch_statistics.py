"""Statistics over the batch are of the global batch, and the batch is not gathered for them."""

import keras
import numpy as np
import pytest
import torch

import shardcore
from shardcore.testing import count_collectives, run_ranks
from tests.distributed.programs import distribute

IMAGES = np.random.default_rng(0).normal(size=(10, 6, 6, 2)).astype("float32")
LABELS = np.random.default_rng(1).integers(0, 3, 10)


def test_batch_normalization_in_training_and_in_its_moving_averages():
    def train(rank, mesh):
        if mesh:
            distribute(mesh)
        keras.utils.set_random_seed(1)
        normalization = keras.layers.BatchNormalization(momentum=0.5)
        layers = [keras.layers.Conv2D(4, 3), normalization, keras.layers.Flatten()]
        model = keras.Sequential([keras.Input((6, 6, 2)), *layers, keras.layers.Dense(3)])
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile("sgd", loss, jit_compile=False)
        model.train_on_batch(IMAGES, LABELS)
        with count_collectives() as traffic:
            loss = model.train_on_batch(IMAGES, LABELS)
        return float(loss), model.get_weights(), dict(traffic.calls)

    ((loss, weights, _),) = run_ranks(train, 1, None)
    for own_loss, own_weights, calls in run_ranks(train, 2, (2, 1)):
        assert own_loss == pytest.approx(loss, abs=1e-6)
        for own, one in zip(own_weights, weights, strict=True):
            np.testing.assert_allclose(own, one, atol=1e-6)
        assert "all_gather" not in calls


@pytest.mark.parametrize("dims", [(0,), (0, 2), None])
@pytest.mark.parametrize("correction", [0, 1])
def test_a_variance_over_a_sharded_dim(dims, correction):
    def statistics(x):
        named = {} if dims is None else {"dim": dims}
        deviation = torch.std(x, correction=correction, **named)
        variance, mean = torch.var_mean(x, correction=correction, keepdim=True, **named)
        (gradient,) = torch.autograd.grad((deviation.sum() + variance.sum() + mean.sum()), x)
        return [deviation, variance, mean, gradient]

    def program(rank):
        distribute((2, 2))
        x = shardcore.ensure_dtensor_input(IMAGES)
        with count_collectives() as traffic:
            found = statistics(x.requires_grad_())
        return [keras.ops.convert_to_numpy(each) for each in found], dict(traffic.calls)

    def reference(rank):
        found = statistics(torch.tensor(IMAGES, requires_grad=True))
        return [keras.ops.convert_to_numpy(each) for each in found]

    (expected,) = run_ranks(reference, 1)
    for found, calls in run_ranks(program, 4):
        assert "all_gather" not in calls
        for own, one in zip(found, expected, strict=True):
            np.testing.assert_allclose(own, one, atol=1e-5)
