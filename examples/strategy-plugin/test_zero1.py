"""The strategy keeps the promises of strategies, and does what it is for."""

from typing import Any

import numpy as np

import shardcore
from shardcore.testing import StrategyContract, count_collectives, run_ranks

import keras  # isort: skip - after the contract, which has chosen the backend

X = np.random.default_rng(0).normal(size=(12, 4)).astype("float32")


class TestZero1(StrategyContract):
    strategy = "zero1"


def train(rank: int, strategy: str | None) -> Any:
    """Returns the numbers after five steps, the bytes stored, and those that a step all-gathers."""
    if strategy is not None:
        shardcore.install(strategy)
        keras.distribution.set_distribution(keras.distribution.DataParallel())
    keras.utils.set_random_seed(1)
    model = keras.Sequential(
        [keras.Input((4,)), keras.layers.Dense(8, "tanh"), keras.layers.Dense(2)]
    )
    model.compile(keras.optimizers.Adam(0.01), "mse")
    for _ in range(5):
        model.train_on_batch(X, X[:, :2])
    slots = [v for v in model.optimizer.variables if v.shape]
    numbers = [keras.ops.convert_to_numpy(v) for v in [*model.weights, *slots]]
    if strategy is None:
        return numbers, None, None
    here = {check.path: check.bytes_here for check in shardcore.verify(model).variables}
    kept = [sum(here[v.path] for v in each) for each in (model.weights, slots)]
    with count_collectives() as traffic:
        model.train_on_batch(X, X[:, :2])
    return numbers, kept, traffic.operand_bytes["all_gather"]


def test_two_ranks_keep_half_of_the_optimizer_state_each() -> None:
    ((expected, _, _),) = run_ranks(train, 1, None)
    weights = sum(array.nbytes for array in expected[:4])
    assert {tuple(kept) for _, kept, _ in run_ranks(train, 2, "dtensor")} == {
        (weights, 2 * weights)
    }
    for numbers, kept, gathered in run_ranks(train, 2, "zero1"):
        assert kept == [weights, weights]
        assert gathered == weights / 2  # its shard of every update
        for found, value in zip(numbers, expected, strict=True):
            np.testing.assert_allclose(found, value, atol=1e-6)
