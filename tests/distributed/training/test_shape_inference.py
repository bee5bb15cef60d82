"""The forward pass by which Keras infers shapes before the first step of a model."""

import keras
import numpy as np
import pytest

from shardcore.testing import run_ranks
from tests.distributed.programs import distribute

CALLED = []


class Spy(keras.layers.Layer):
    """Notes on which device it is called, and with how many rows of this rank."""

    def call(self, x):
        rows = x.to_local().shape[0] if hasattr(x, "to_local") else x.shape[0]
        CALLED.append((x.device.type, rows))
        return x


def attention(x):
    return keras.layers.MultiHeadAttention(2, 6)(x, x)


def grouped_attention(x):
    return keras.layers.GroupQueryAttention(6, 4, 2)(x, x)


def calls_before_and_in_the_first_step(rank, policy, layer, rows):
    keras.config.set_dtype_policy(policy)
    distribute((2, 1))
    x = keras.Input((6, 12))
    model = keras.Model(x, keras.layers.Dense(4, dtype="float32")(Spy()(layer(x))))
    model.compile("sgd", "mse", jit_compile=False)
    CALLED.clear()
    model.train_on_batch(np.ones((rows, 6, 12), "float32"), np.ones((rows, 6, 4), "float32"))
    return CALLED


@pytest.mark.parametrize(
    ("policy", "layer", "rows", "first"),
    [
        # Keras' variables have the wrong dtype on the meta device, which shardcore mends.
        ("mixed_bfloat16", attention, 8, ("meta", 8)),
        # On the meta device `ops.repeat` gives a KerasTensor, which the next operator cannot read.
        ("float32", grouped_attention, 8, ("cpu", 4)),
        ("float32", grouped_attention, 1, ("cpu", 1)),
    ],
)
def test_no_rank_runs_the_rows_of_others(policy, layer, rows, first):
    for called in run_ranks(calls_before_and_in_the_first_step, 2, policy, layer, rows):
        assert called == [first, ("cpu", max(1, rows // 2))]
