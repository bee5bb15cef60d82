"""Captured steps with operators that write what their schemas do not say, and with constants."""

import keras
import numpy as np
import pytest
import torch

from shardcore.testing import run_ranks
from tests.distributed.capture.steps import begin


class WithHead(keras.Model):
    """Has a layer whose kernel is sharded over the model axis."""

    def __init__(self):
        super().__init__()
        self.dense = keras.layers.Dense(4, name="head")


class Twice(WithHead):
    """Normalizes the same rows twice: batch norm of torch updates its statistics each time."""

    def __init__(self):
        super().__init__()
        self.norm = torch.nn.BatchNorm1d(4)

    def call(self, x):
        return self.dense(self.norm(x) + self.norm(x))


class Branch(Twice):
    """Updates statistics before the step branches on its values, which undoes a replay."""

    def call(self, x):
        y = self.norm(x)
        return self.dense(y * 2 if x.sum() > 0 else y)


class Between(Twice):
    """Reads the statistics before and after."""

    def call(self, x):
        before = self.norm.module.running_mean * 2
        y = self.norm(x)
        return self.dense(y) + self.norm.module.running_mean * 2 - before


class WithoutAutocast(WithHead):
    """Multiplies constants in float32, in a step that is cast to bfloat16."""

    def call(self, x):
        with torch.autocast("cpu", enabled=False):
            table = torch.arange(16.0).view(4, 4) / 7
            table = table @ table
        return self.dense(x) + table[0]


class Recurrent(WithHead):
    """Runs an LSTM of constants, which gives less where no gradients are recorded."""

    def call(self, x):
        zeros, weights = torch.zeros(1, 2, 5), torch.full((20, 5), 0.1)
        steps, state, weight = torch.ones(3, 2, 5), (zeros, zeros), [weights, weights]
        outputs = torch.lstm(steps, state, weight, False, 1, 0.0, False, False, False)
        return self.dense(x) + outputs[0].sum()


def trained(kind, jit_compile):
    keras.utils.set_random_seed(1)
    model = kind()
    model.compile("sgd", "mse", jit_compile=jit_compile)
    rows, losses = np.arange(8, dtype="float32")[:, None] / 10, []
    with torch.autocast("cpu", torch.bfloat16, kind is WithoutAutocast, cache_enabled=False):
        for step in range(10):
            x = np.full((8, 4), (-1.0) ** step * (1 + step % 3), "float32") + rows
            losses.append(float(model.train_on_batch(x, x)))
    state = model.norm.module.state_dict().values() if isinstance(model, Twice) else ()
    return [np.array(losses), *(np.asarray(tensor.detach()) for tensor in state)]


@pytest.mark.parametrize("shape", [None, (1, 2)])
@pytest.mark.parametrize("kind", [Twice, Branch, Between, WithoutAutocast, Recurrent])
def test_captured_steps_have_the_numbers_of_eager_ones(kind, shape):
    def program(rank):
        begin(shape)
        return trained(kind, "auto"), trained(kind, False)

    for captured, eager in run_ranks(program, 1 if shape is None else 2):
        for found, expected in zip(captured, eager, strict=True):
            np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)
