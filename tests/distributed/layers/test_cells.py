"""Cells of a notebook that are run again: cleared sessions, other models, other distributions."""

import keras
import numpy as np
import pytest

import shardcore
from shardcore.testing import run_ranks
from tests.distributed.programs import assert_close

X = np.linspace(-1, 1, 64, dtype="float32").reshape(16, 4)


def columns():
    mesh = keras.distribution.DeviceMesh((1, 2), ("data", "model"))
    rules = keras.distribution.LayoutMap(mesh)
    rules["net/hidden/kernel"] = (None, "model")
    return keras.distribution.ModelParallel(layout_map=rules)


def plain():
    return None


def cell(distribution, units=8):
    keras.utils.set_random_seed(1)
    keras.distribution.set_distribution(distribution())
    hidden = keras.layers.Dense(units, name="hidden")
    model = keras.Sequential([keras.Input((4,)), hidden, keras.layers.Dense(2)], name="net")
    model.compile("adam", "mse", jit_compile=False)
    return model, losses(model, epochs=3)


def losses(model, **options):
    history = model.fit(X, X[:, :2], batch_size=8, shuffle=False, verbose=0, **options)
    return history.history["loss"]


class Interrupts(keras.callbacks.Callback):
    """The stop button of a notebook, in the second step."""

    def on_train_batch_end(self, batch, logs=None):
        if batch == 1:
            raise KeyboardInterrupt


def cells(distributions):
    """Cleared sessions, two models at a time, and an interrupted cell that is run again."""
    found = {}
    for number, distribution in enumerate(distributions):
        found[f"cleared {number}"] = cell(distribution)[1]
        keras.utils.clear_session()
        assert keras.distribution.distribution() is None
    first, found["first"] = cell(distributions[0])
    second, found["second"] = cell(distributions[0], 6)
    with pytest.raises(KeyboardInterrupt):
        losses(second, callbacks=[Interrupts()])
    found["first goes on"] = losses(first)
    found["second goes on"] = losses(second)
    found["other"] = cell(distributions[1])[1]
    return found


def test_cells_run_again_give_the_numbers_of_one_device(capfd):
    def program(rank):
        shardcore.install()
        return cells([keras.distribution.DataParallel, columns])

    (expected,) = run_ranks(lambda rank: cells([plain] * 2), 1)
    assert_close(run_ranks(program, 2), expected)
    assert "ignored in" not in capfd.readouterr().err
