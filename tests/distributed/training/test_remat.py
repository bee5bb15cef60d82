"""Layers of a `keras.RematScope` are recomputed in the backward pass, in captured steps too."""

import keras
import numpy as np
import pytest

import shardcore
from shardcore.testing import run_ranks
from tests.distributed.programs import distribute
from tests.traces import highest

FULLY_SHARDED = {".*kernel": ("data", None)}
MEGATRON = {".*up/kernel": (None, "model"), ".*down/kernel": ("model", None)}
BATCH = 32


class Block(keras.layers.Layer):
    """Its largest tensors are eight times as large as its output; it draws without a seed."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.up = keras.layers.Dense(128, activation="gelu", name="up")
        self.down = keras.layers.Dense(16, name="down")
        self.dropout = keras.layers.Dropout(0.2)

    def call(self, x):
        return x + self.dropout(self.down(self.up(x)))


def trained(_rank, strategy, mesh, rules, scope, jit):
    """The losses of steps, and the most bytes that torch holds in one."""
    if mesh is not None:
        distribute(mesh, rules, strategy=strategy)
    elif strategy:
        shardcore.install(strategy)
    keras.utils.set_random_seed(0)
    with keras.RematScope(**scope):
        blocks = [Block() for _ in range(3)]
    model = keras.Sequential([keras.Input((8, 16)), *blocks, keras.layers.Dense(4)])
    model.compile("sgd", "mse", jit_compile=jit)
    draw = np.random.default_rng(0).normal
    x, y = draw(size=(2 * BATCH, 8, 16)), draw(size=(2 * BATCH, 8, 4))
    losses = model.fit(x, y, batch_size=BATCH, epochs=2, verbose=0).history["loss"]
    held = highest(lambda: model.fit(x[:BATCH], y[:BATCH], batch_size=BATCH, verbose=0))
    return losses, held


FULL, OFF = {"mode": "full"}, {"mode": None}
LARGE = {"mode": "larger_than", "output_size_threshold": 256}


@pytest.mark.parametrize(
    ("strategy", "mesh", "rules", "scope"),
    [
        ("single", None, {}, FULL),
        ("dtensor", (2, 1), FULLY_SHARDED, LARGE),
        ("manual", (1, 2), MEGATRON, FULL),
    ],
)
def test_captured_steps_hold_less_and_have_the_numbers_of_one_device(strategy, mesh, rules, scope):
    ((expected, _),) = run_ranks(trained, 1, None, None, {}, scope, False)
    ranks = 1 if mesh is None else 2
    found = run_ranks(trained, ranks, strategy, mesh, rules, scope, "auto")
    whole = run_ranks(trained, ranks, strategy, mesh, rules, OFF, "auto")
    for (losses, held), (_, without) in zip(found, whole, strict=True):
        np.testing.assert_allclose(losses, expected, atol=1e-5)
        assert held < 0.6 * without
