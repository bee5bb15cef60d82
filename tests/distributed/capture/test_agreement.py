"""Ranks that would do different things are found at the first step, and named, on every rank."""

import os

import keras
import numpy as np
import pytest

from shardcore.domain.errors import RankMismatchError
from shardcore.testing import run_ranks
from tests.distributed.programs import assert_fails_everywhere, distribute

X = np.random.default_rng(0).normal(size=(4, 4)).astype("float32")


def train(*, mesh=(2, 1), rule=(None, "model"), units=4, x=X, extra=False, capture="", jit="auto"):
    os.environ["SHARDCORE_CAPTURE"] = capture  # of this rank, which was forked for the test
    distribute(mesh, {".*hidden/kernel": rule})
    keras.utils.set_random_seed(1)
    layers = [keras.layers.Dense(units, name="hidden"), keras.layers.Dense(1, name="head")]
    if extra:
        layers.append(keras.layers.Dense(1, name="extra"))
    model = keras.Sequential([keras.Input((4,)), *layers])
    model.compile("sgd", "mse", jit_compile=jit)
    model.fit(x, np.zeros((len(x), 1)), verbose=0, shuffle=False)


@pytest.mark.parametrize(
    ("usual", "odd", "message"),
    [
        (
            {"mesh": (1, 2)},
            {"mesh": (1, 2), "rule": ("model", None)},
            r"sequential/hidden/kernel: rank 1 .*\('model', None\), rank 0 .*\(None, 'model'",
        ),
        ({}, {"mesh": (1, 2)}, r"mesh: rank 1 has .*data=1, model=2.*, rank 0 has .*data=2"),
        ({}, {"units": 6}, r"variable sequential/hidden/kernel: rank 1 has shape \(4, 6\)"),
        (
            {},
            {"extra": True},
            r"variable sequential/extra/kernel: rank 1 has .*, rank 0 has nothing",
        ),
        ({}, {"capture": "audit"}, r"SHARDCORE_CAPTURE: rank 1 has at_once=True, audit=10, rank 0"),
        ({}, {"jit": False}, r"compile\(jit_compile=\): rank 1 has False, rank 0 has auto"),
        ({}, {"x": X + 1}, r"batch input 0: rank 1 has .*content .* Give every process the same"),
    ],
    ids=["rule", "mesh", "shape", "variable", "capture", "compile", "batch"],
)
def test_every_rank_names_the_deviation_of_rank_1(usual, odd, message):
    assert_fails_everywhere(
        lambda rank: train(**(odd if rank == 1 else usual)), 2,
        error=RankMismatchError, match=message, timeout=20,
    )  # fmt: skip


def test_the_odd_one_of_four_is_named():
    assert_fails_everywhere(
        lambda rank: train(mesh=(4, 1), units=6 if rank == 2 else 4), 4,
        error=RankMismatchError, match="rank 2 has .*, rank 0, 1, 3 has", timeout=20,
    )  # fmt: skip


def test_ranks_agree_without_a_seed_of_the_user():
    def program(rank):
        distribute((2, 1))
        layer = keras.layers.Dense(4)
        layer.build((None, 4))
        dropped = keras.layers.Dropout(0.5)(np.ones((8, 8), "float32"), training=True)
        return layer.kernel.numpy(), keras.ops.convert_to_numpy(dropped), np.random.rand()

    first, second = run_ranks(program, 2)
    for mine, other in zip(first, second, strict=True):
        np.testing.assert_array_equal(mine, other)
    (again, _) = run_ranks(program, 2)
    assert np.abs(again[0] - first[0]).max() > 1e-3  # a new one each time


def test_the_seed_of_the_user_is_left_alone():
    def program(rank, mesh):
        keras.utils.set_random_seed(7)
        if mesh:
            distribute(mesh)
        return keras.ops.convert_to_numpy(keras.random.normal((3,)))

    (reference,) = run_ranks(program, 1, None)
    for values in run_ranks(program, 2, (2, 1)):
        np.testing.assert_array_equal(values, reference)


def test_own_rows_with_weights_on_one_rank_only_are_named_before_they_are_joined():
    def program(rank):
        distribute((2, 1), auto_shard_dataset=False)
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
        weights = np.ones(4, "float32") if rank == 1 else None
        model.train_on_batch(np.ones((4, 3)), np.ones((4, 1)), sample_weight=weights)

    assert_fails_everywhere(program, 2, error=RankMismatchError, match="batch inputs", timeout=20)
