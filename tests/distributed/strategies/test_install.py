"""install(), uninstall() and status() on the real Keras: names, numbers, and what is left."""

import importlib
import sys

import keras
import numpy as np
import pytest
from torch.distributed.tensor import DTensor

import shardcore
from shardcore.binding.patch_table import PATCHES
from shardcore.domain.errors import StrategyError
from shardcore.testing import run_ranks
from tests.distributed.strategies.keras_names import holder_of, in_one_process, keras_names, name_of


def test_install_is_idempotent():
    def program():
        first = shardcore.install("dtensor")
        before = keras_names()
        assert shardcore.install("dtensor") == shardcore.install("auto") == first
        assert keras_names() == before
        shardcore.uninstall()
        shardcore.uninstall()
        return shardcore.status().installed

    assert in_one_process(program) is False


def test_another_strategy_needs_an_uninstall_first():
    def program():
        shardcore.install("dtensor")
        with pytest.raises(StrategyError, match=r"'dtensor', so .*'single': call shardcore\.unin"):
            shardcore.install("single")
        kept = shardcore.status().strategy
        shardcore.uninstall()
        return kept, shardcore.install("single").strategy

    assert in_one_process(program) == ("dtensor", "single")


def test_status_tells_what_is_in_use():
    def program(rank):
        before = shardcore.status()
        shardcore.install()
        mesh = keras.distribution.DeviceMesh((1, 2), ("data", "model"))
        keras.distribution.set_distribution(
            keras.distribution.ModelParallel(layout_map=keras.distribution.LayoutMap(mesh))
        )
        return before, shardcore.status()

    for rank, (before, status) in enumerate(run_ranks(program, 2)):
        assert (before.installed, before.strategy, before.devices) == (False, None, ())
        assert (status.installed, status.strategy) == (True, "dtensor")
        passed_over = dict.fromkeys(["manual", "single"], "'dtensor' has precedence.")
        assert status.passed_over == passed_over
        assert (status.mesh_shape, status.axis_names) == ((1, 2), ("data", "model"))
        assert (status.devices, status.rank, status.world_size) == (("cpu:0", "cpu:1"), rank, 2)
        assert status.versions["keras"] == keras.__version__
        assert "data=1, model=2" in str(status)


def importers(module, name):
    """The other modules of Keras that have the value of `module.name`, under that name."""
    value = getattr(importlib.import_module(module), name)
    return {
        f"{other}:{name}"
        for other, each in sys.modules.items()
        if other.partition(".")[0] == "keras" and getattr(each, name, None) is value
    }


def test_install_replaces_the_names_of_the_table_and_uninstall_restores_every_one():
    def program():
        expected, importing = {name_of(patch) for patch in PATCHES.values()}, set()
        for patch in PATCHES.values():
            if patch.everywhere:
                importing |= importers(*patch.place.split(":"))
        assert importing - expected
        before = keras_names()
        shardcore.install()
        during = keras_names()
        shardcore.uninstall()
        after = keras_names()
        changed = {name for name in during if before.get(name) != during[name]}
        left = {name for name in after | before if before.get(name) != after.get(name)}
        return expected | importing, changed, left

    expected, changed, left = in_one_process(program)
    assert changed == expected
    assert left == set()


@pytest.mark.parametrize("patch", PATCHES)
def test_uninstall_restores(patch):
    """Name by name, so that the report names the one that is wrong."""

    def program():
        holder, name = holder_of(PATCHES[patch])
        before = vars(holder).get(name)  # None: a class inherits it
        shardcore.install()
        during = vars(holder)[name]
        shardcore.uninstall()
        return during is not before, vars(holder).get(name) is before

    assert in_one_process(program) == (True, True)


def test_names_imported_before_install_work():
    def program(rank):
        from keras.distribution import DataParallel, DeviceMesh, distribution, set_distribution
        from keras.ops import convert_to_numpy
        from keras.utils import clear_session

        shardcore.install("dtensor")
        set_distribution(DataParallel(device_mesh=DeviceMesh((2,), ["batch"])))
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])
        # A plain tensor meets a sharded one: the scope of the distribution is entered.
        y = model(keras.ops.ones((4, 3))) + keras.ops.ones((4, 2))
        shape = convert_to_numpy(y).shape
        clear_session()
        return shape, distribution() is None

    assert run_ranks(program, 2) == [((4, 2), True)] * 2


def train():
    """Weights and losses of a small model that has most kinds of state."""
    keras.utils.set_random_seed(3)
    layers = keras.layers
    model = keras.Sequential(
        [
            keras.Input((6,)),
            layers.Dense(8, "relu"),
            layers.BatchNormalization(),
            layers.Dropout(0.3),
            layers.Dense(3),
        ]
    )
    model.compile("adam", "mse", metrics=["mae"])
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(20, 6)), rng.normal(size=(20, 3))
    history = model.fit(x, y, batch_size=8, epochs=2, validation_split=0.2, verbose=0).history
    return history, [*model.get_weights(), model.predict(x, verbose=0)]


def test_without_a_distribution_the_numbers_are_keras_own():
    def program(install):
        if install:
            shardcore.install("dtensor")
        return train()

    history, arrays = in_one_process(program, True)
    expected_history, expected_arrays = in_one_process(program, False)
    assert history == expected_history
    for array, expected in zip(arrays, expected_arrays, strict=True):
        np.testing.assert_array_equal(array, expected)


def test_after_uninstall_keras_is_keras():
    def program(rank, install):
        if install:
            shardcore.install("dtensor")
            keras.distribution.set_distribution(keras.distribution.DataParallel())
            assert isinstance(keras.Variable(np.ones(2)).value, DTensor)
            shardcore.uninstall()
        try:
            devices = keras.distribution.list_devices()
        except AttributeError:  # Keras 3.15 cannot on torch
            devices = None
        keras.distribution.set_distribution(None)
        return devices, train()[0]

    assert run_ranks(program, 2, True) == run_ranks(program, 2, False)


def test_clear_session_drops_the_distribution_and_another_one_can_be_set():
    def program(rank):
        shardcore.install("dtensor")
        names, losses = [], []
        for _ in range(2):
            keras.distribution.set_distribution(keras.distribution.DataParallel())
            history, _ = train()
            names.append(keras.layers.Dense(1).name)
            losses.append(history["loss"])
            keras.utils.clear_session()
            assert keras.distribution.distribution() is None
            assert shardcore.status().mesh_shape is None
        return names, losses[0] == losses[1]

    assert run_ranks(program, 2) == [(["dense_2", "dense_2"], True)] * 2
