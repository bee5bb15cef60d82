"""`shardcore.build` plans, builds and verifies; ranks of a job share one search."""

import logging
from unittest import mock

import keras
import numpy as np
import pytest

import shardcore
from shardcore.bootstrap.cost import auto
from shardcore.domain.errors import PolicyError
from shardcore.testing import run_ranks

BATCH = np.ones((4, 8), "float32"), np.zeros((4, 2), "float32")


def net():
    model = keras.Sequential(
        [keras.Input((8,)), keras.layers.Dense(64, name="up"), keras.layers.Dense(2, name="down")],
        name="net",
    )
    model.compile("sgd", "mse")
    return model


def loss_of(model):
    return float(model.train_on_batch(*BATCH))


def logged(level):
    """Returns the list that gets the messages about plans from now on."""
    lines = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    logging.getLogger("shardcore.plan").addHandler(handler)
    logging.getLogger("shardcore.plan").setLevel(level)
    return lines


def of_one_device(_rank):
    keras.utils.set_random_seed(0)
    return loss_of(net())


def test_ranks_share_the_search_of_rank_0():
    def program(rank):
        keras.utils.set_random_seed(0)
        with mock.patch.object(auto, "_search", wraps=auto._search) as search:
            model = shardcore.build(net, batch=BATCH, machine="a100")
        assert search.call_count == (rank == 0)
        return loss_of(model), shardcore.verify(model).ok, shardcore.status().mesh_shape

    plan = shardcore.plan(net, devices=2, policy="auto", batch=BATCH, machine="a100")
    (expected,) = run_ranks(of_one_device, 1)
    for result in run_ranks(program, 2):
        assert result == (pytest.approx(expected, rel=1e-6), True, plan.mesh.shape)


def test_all_ranks_raise_the_error_of_the_search():
    class Printing(keras.layers.Layer):
        def call(self, x):
            return x * (float(keras.ops.sum(x)) if keras.ops.is_tensor(x) else 1.0)

    def reading():
        model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(2), Printing()])
        model.compile("sgd", "mse")
        return model

    def program(_rank):
        with pytest.raises(PolicyError) as error:
            shardcore.build(reading, batch=BATCH, machine="a100")
        return str(error.value)

    first, second = run_ranks(program, 2)
    assert first == second
    assert "without values" in first


def test_a_policy_on_a_mesh_builds_its_shards_and_logs_one_line():
    def program(_rank):
        lines = logged(logging.INFO)
        keras.utils.set_random_seed(0)
        shardcore.install()
        mesh = keras.distribution.DeviceMesh((2,), ("data",))
        model = shardcore.build(net, "fully_sharded", mesh=mesh, small=0)
        (kernel, *_) = shardcore.verify(model).variables
        return loss_of(model), kernel.local_shape, lines

    (expected,) = run_ranks(of_one_device, 1)
    for loss, shape, lines in run_ranks(program, 2):
        assert loss == pytest.approx(expected, rel=1e-6)
        assert shape == (8, 32)
        assert lines == [
            "The model is built: fully_sharded over mesh (data=2): 1.4 KiB of variables on a rank."
        ]


def test_a_policy_that_shards_nothing_over_an_axis_warns():
    def odd():
        head = keras.layers.Dense(2, name="head")
        model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(3, name="up"), head])
        model.compile("sgd", "mse")
        return model

    def program(_rank):
        lines = logged(logging.WARNING)
        shardcore.install()
        mesh = keras.distribution.DeviceMesh((1, 2), ("data", "model"))
        for make in (net, odd):
            shardcore.build(make, "tensor_parallel", mesh=mesh, small=0)
            lines.append("built")
        return lines

    before, line, after = run_ranks(program, 2)[0]
    assert before == after == "built"
    assert "tensor_parallel shards nothing over mesh axis 'model': its 2 ranks" in line


def test_what_cannot_be_built_says_what_to_give():
    def program(_rank):
        with pytest.raises(PolicyError, match="takes a mesh"):
            shardcore.build(net, "fully_sharded")
        with pytest.raises(PolicyError, match="give batch="):
            shardcore.build(net)
        with pytest.raises(PolicyError, match="No layout fits"):
            shardcore.build(net, batch=BATCH, memory="1KB")
        with pytest.raises(PolicyError, match="give the function"):
            shardcore.build(net(), batch=BATCH)

    run_ranks(program, 1)
