"""`keras.distribution`: the distribution that is set, and the examples of Keras' docstrings."""

import logging
import socket

import keras
import numpy as np
import pytest
from keras import distribution as kd

import shardcore
from shardcore.domain.errors import LayoutError
from shardcore.testing import run_ranks
from tests.distributed.keras_distribution.installed import installed, mesh_1_2


def placement_of(variable):
    """The placements of the new variable."""
    return " ".join(map(str, variable.value.placements)) if variable._layout else "plain"


def new_variable():
    return placement_of(keras.Variable(np.ones((2, 2)), name="kernel"))


def column_parallel():
    layout_map = kd.LayoutMap(mesh_1_2())
    layout_map["kernel"] = (None, "model")
    return kd.ModelParallel(layout_map=layout_map)


def test_set_distribution_and_none():
    def program(rank):
        seen = [kd.distribution(), new_variable()]
        model_parallel = column_parallel()
        kd.set_distribution(model_parallel)
        seen += [kd.distribution() is model_parallel, new_variable()]
        kd.set_distribution(None)
        return [*seen, kd.distribution(), new_variable()]

    assert installed(program, 2) == [[None, "plain", True, "R S(1)", None, "plain"]] * 2


def test_scope_nests_and_is_left_by_exceptions_too():
    def program(rank):
        outer, inner = column_parallel(), kd.DataParallel()
        seen = []

        def fail_inside():
            with inner.scope():
                seen.extend([kd.distribution() is inner, new_variable()])
                raise KeyError

        with outer.scope():
            with pytest.raises(KeyError):
                fail_inside()
            seen += [kd.distribution() is outer, new_variable()]
        return [*seen, kd.distribution(), new_variable()]

    expected = [True, "R", True, "R S(1)", None, "plain"]
    assert installed(program, 2) == [expected] * 2


def test_clear_session_leaves_the_distribution():
    def program(rank):
        kd.set_distribution(column_parallel())
        before = new_variable()
        keras.utils.clear_session()
        return before, kd.distribution(), new_variable()

    assert installed(program, 2) == [("R S(1)", None, "plain")] * 2


def test_two_distributions_one_after_another():
    def program(rank):
        x, y = np.ones((4, 2)), np.ones((4, 2))
        losses = []
        for distribution in (column_parallel(), kd.DataParallel(), column_parallel()):
            keras.utils.set_random_seed(1)
            kd.set_distribution(distribution)
            model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(2)])
            model.compile("sgd", "mse")
            losses.append([model.train_on_batch(x, y) for _ in range(2)])
        return losses

    for first, second, third in installed(program, 2):
        assert first == third
        np.testing.assert_allclose(first, second, rtol=0, atol=1e-6)
        assert first[0] > first[1]


def test_the_examples_of_layout_map_and_model_parallel():
    def program(rank):
        devices = kd.list_devices()  # 8 devices
        local = []
        for shape in ((2, 4), (1, 8)):
            device_mesh = kd.DeviceMesh(shape=shape, axis_names=("batch", "model"), devices=devices)
            layout_map = kd.LayoutMap(device_mesh)
            layout_map[".*dense.*kernel"] = (None, "model")
            layout_map[".*dense.*bias"] = ("model",)
            layout_map[".*conv2d.*kernel"] = (None, None, None, "model")
            layout_map[".*conv2d.*bias"] = ("model",)
            distribution = kd.ModelParallel(layout_map=layout_map, batch_dim_name="batch")
            kd.set_distribution(distribution)
            dense = keras.layers.Dense(16, name="dense_1")
            dense.build((None, 4))
            conv2d = keras.layers.Conv2D(8, 3, name="conv2d_123")
            conv2d.build((None, 5, 5, 3))
            both = [dense.kernel, dense.bias, conv2d.kernel, conv2d.bias]
            local.append([tuple(v.value.to_local().shape) for v in both])
            assert layout_map["my_model/conv3d_1/kernel"] is None
            assert layout_map["my_model/conv2d_123/bias"].axes == ("model",)
        return local

    four = [(4, 4), (4,), (3, 3, 3, 2), (2,)]
    eight = [(4, 2), (2,), (3, 3, 3, 1), (1,)]
    assert installed(program, 8) == [[four, eight]] * 8


def test_a_batch_axis_that_the_mesh_lacks_is_named():
    def program(rank):
        layout_map = kd.LayoutMap(mesh_1_2())
        with pytest.raises(LayoutError, match=r"batch_dim_name='rows'.*\('data', 'model'\)"):
            kd.ModelParallel(layout_map=layout_map, batch_dim_name="rows")

    installed(program, 2)


def test_a_rule_with_a_wrong_axis_is_named_and_not_kept():
    def program(rank):
        shardcore.install("dtensor")
        mesh = keras.distribution.DeviceMesh((1, 1), ("data", "model"))
        rules = keras.distribution.LayoutMap(mesh)
        with pytest.raises(ValueError, match=r"Rule '\.\*kernel': Invalid axis names.*'modle'"):
            rules[".*kernel"] = (None, "modle")
        return len(rules)

    assert run_ranks(program, 1, init=False) == [0]


def on_two_hosts(rank, shape, axis_names):
    """Returns what is logged where a distribution is set, and the hosts in the status."""
    socket.gethostname = lambda: f"host-{rank // 2}"
    messages, logger = [], logging.getLogger("shardcore.session")
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())
    logger.addHandler(handler)
    shardcore.install("dtensor")
    mesh = kd.DeviceMesh(shape, axis_names)
    for _ in range(2):
        distribution = kd.ModelParallel(layout_map=kd.LayoutMap(mesh), batch_dim_name="data")
        kd.set_distribution(distribution)
        keras.layers.Dense(2).build((4, 4))
    return messages, shardcore.status().hosts


def test_a_model_axis_that_crosses_hosts_has_one_warning():
    for messages, hosts in run_ranks(on_two_hosts, 4, (2, 2), ("model", "data")):
        assert hosts == ("host-0", "host-0", "host-1", "host-1")
        (message,) = messages
        assert "Mesh axis 'model' crosses hosts: its ranks 0, 2 are on host-0, host-1" in message
    for messages, _ in run_ranks(on_two_hosts, 4, (2, 2), ("data", "model")):
        assert messages == []
