"""Strategy `manual`: variables that are sharded over the model axis."""

import gc

import keras
import pytest
import torch

import shardcore
from shardcore.adapters.engine.dtensors import ShardedDTensor
from shardcore.adapters.engine.local_shards import LocalShardTensor
from shardcore.testing import count_collectives, run_ranks
from tests.distributed.strategies.manual import (
    KERNEL,
    ROWS,
    TARGETS,
    calls_of_a_step,
    distribute,
    hold,
    perceptron,
)

GATHER = {"weights": "gather"}
COLUMN = {"net/dense_1/kernel": (None, "model")}


@pytest.mark.parametrize("held", [None, 0])
def test_a_gathered_variable_of_the_model_axis_gets_its_slice_of_the_gradient(held):
    """Each rank computes all of it: the forward pass needs the kernel, and the backward pass."""
    ((calls, _), _) = run_ranks(calls_of_a_step, 2, (1, 2), COLUMN, GATHER, held)
    assert calls == {"all_gather": 2}


def test_a_variable_of_the_model_axis_is_computed_with_by_default():
    """Nothing gathers it. The bias, which is whole, gathers its gradient; that of the input is
    summed: each rank has the part of its columns.
    """
    ((calls, sent), _) = run_ranks(calls_of_a_step, 2, (1, 2), COLUMN, {}, 0)
    assert calls == {"all_gather": 1, "all_reduce": 1}
    assert sent["all_reduce"] == ROWS.shape[0] * 8 * 4


MEGATRON = {
    "net/column/kernel": (None, "model"),
    "net/column/bias": ("model",),
    "net/row/kernel": ("model", None),
}


def test_a_pair_of_columns_and_rows_sums_twice_under_both_strategies():
    """The outputs of the rows in the forward pass, the gradient of the input in the backward."""

    def program(rank, strategy):
        distribute((1, 2), MEGATRON, strategy)
        keras.utils.set_random_seed(3)
        layers = [
            keras.layers.Dense(5, activation="tanh"),
            keras.layers.Dense(8, activation="tanh", name="column"),
            keras.layers.Dense(3, name="row"),
        ]
        model = keras.Sequential([keras.Input((6,)), *layers], name="net")
        with count_collectives() as forward:
            loss = torch.mean((model(torch.tensor(ROWS)) - torch.tensor(TARGETS)) ** 2)
        with count_collectives() as backward:
            loss.backward()
        kinds = {type(v._value) for v in model.variables}
        counted = [(dict(each.calls), dict(each.operand_bytes)) for each in (forward, backward)]
        return counted, kinds

    outputs, inputs = 4 * 12 * 3, 4 * 12 * 5
    expected = [({"all_reduce": 1}, {"all_reduce": size}) for size in (outputs, inputs)]
    for strategy, kind in {"manual": LocalShardTensor, "dtensor": ShardedDTensor}.items():
        assert run_ranks(program, 2, strategy) == [(expected, {kind})] * 2


def full_kernels_alive(rank, held):
    distribute((2, 1), {".*kernel": (None, "data")}, **GATHER)
    model = perceptron()
    hold(model, held)
    x = shardcore.distribute_tensor(torch.tensor(ROWS[:10]), ("data", None))
    loss = model(x).sum()
    gc.collect()
    whole = [(6, 8), (8, 3)]
    plain = [t for t in gc.get_objects() if type(t) is torch.Tensor]
    found = sorted(tuple(t.shape) for t in plain if tuple(t.shape) in whole)
    loss.backward()
    return found


def test_a_gathered_kernel_above_the_limit_is_freed_after_its_use():
    assert run_ranks(full_kernels_alive, 2, KERNEL - 1) == [[], []]
    # The oldest goes: both do not fit.
    assert run_ranks(full_kernels_alive, 2, 4 * 6 * 8) == [[(8, 3)]] * 2
    assert run_ranks(full_kernels_alive, 2, 4 * 6 * 8 + KERNEL) == [[(6, 8), (8, 3)]] * 2
