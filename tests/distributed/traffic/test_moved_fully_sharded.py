"""Fully sharded: weights are gathered, at most twice; gradients are reduce-scattered, once."""

from collections import Counter

import keras
import numpy as np
import pytest

import shardcore
from shardcore.testing import count_collectives, run_ranks
from tests.distributed.models import cnn, decoder, mlp
from tests.distributed.traffic.moved import (
    DATA,
    assert_same,
    compiled,
    distribute,
    lstm,
    numbers,
    trained_shapes,
)

MODELS = (mlp, cnn, lstm, decoder)


def every_model(rank, mesh=None):
    found = {}
    for build in MODELS:
        keras.utils.clear_session(free_memory=False)
        if mesh:
            distribute(build, mesh, policy="fully_sharded", small=0)
        found[build.__name__] = two_steps(build, DATA[build], explained=mesh is not None)
    return found


def two_steps(build, data, explained):
    """The numbers; what the second step moves, and how often it moves each variable."""
    model = compiled(build, classes=data[1].dtype.kind == "i", jit_compile=False)
    model.train_on_batch(*data)
    of_variables = {v.path: Counter() for v in model.trainable_variables}
    for each in shardcore.explain(model, data).collectives if explained else ():
        for path in of_variables.keys() & set(each.variables):
            of_variables[path][each.kind] += each.times
    with count_collectives() as traffic:
        logs = model.train_on_batch(*data, return_dict=True)
    moved = dict(traffic.calls), dict(traffic.operand_bytes), of_variables
    return numbers(model, logs), *moved


@pytest.fixture(scope="module")
def one_device():
    (found,) = run_ranks(every_model, 1)
    return {name: values for name, (values, *_) in found.items()}


@pytest.fixture(scope="module")
def two_ranks():
    return run_ranks(every_model, 2, (2, 1), timeout=120)


def padded_bytes(shape):
    """Two chunks, along the largest dim that is even; if none is, the second chunk is padded."""
    size = 4 * int(np.prod(shape))
    return size if any(dim % 2 == 0 for dim in shape) else size // max(shape) * (max(shape) + 1)


@pytest.mark.parametrize("build", MODELS)
def test_weights_move_and_activations_do_not(build, one_device, two_ranks):
    name = build.__name__
    shapes = trained_shapes(build)
    padded = list(map(padded_bytes, shapes))
    statistics = 4 if build is cnn else 0
    for values, calls, moved, variables in (each[name] for each in two_ranks):
        assert_same(values, one_device[name], name)
        assert calls["all_reduce"] == 1 + statistics  # the loss, and batch statistics
        assert calls["reduce_scatter"] == len(shapes)
        assert moved["reduce_scatter"] == sum(padded)
        assert len(variables) == len(shapes)
        for path, counts in variables.items():
            assert counts["all_gather"] in (1, 2), (path, counts)
            assert counts["reduce_scatter"] == 1, (path, counts)
        assert sum(padded) // 2 <= moved["all_gather"] <= sum(padded)
