"""Folders of Keras' `OrbaxCheckpoint`, over ranks: `make orbax` runs them, with the package."""

import os
import subprocess
import sys
from pathlib import Path

import keras
import numpy as np
import pytest

import shardcore
from benchmarks import memory
from shardcore.domain.errors import CheckpointError
from shardcore.testing import run_ranks
from tests.distributed.files.files_of_others import distribute

RULES = {"hidden/kernel": (None, "model"), "out/kernel": ("model", "data")}
MIB = 2**20


def build(seed=1, size=8):
    keras.utils.set_random_seed(seed)
    inputs = keras.Input((6,))
    hidden = keras.layers.Dense(size, name="hidden")(inputs)
    x = keras.layers.BatchNormalization(name="norm")(hidden)
    x = keras.layers.Dropout(0.1, seed=3, name="dropout")(x)
    x = keras.layers.Dense(4, name="out", dtype="mixed_bfloat16")(x)
    half = keras.layers.Dense(4, name="half", dtype="bfloat16")(x)
    model = keras.Model(inputs, half, name="net")
    model.compile(keras.optimizers.Adam(), "mse", metrics=["mae"])
    return model


def fit(model, *callbacks):
    rng = np.random.default_rng(1)
    x, y = rng.random((32, 6), dtype="float32"), rng.random((32, 4), dtype="float32")
    model.fit(x, y, epochs=2, batch_size=8, shuffle=False, verbose=0, callbacks=callbacks)


def state(model):
    """The values of weights and optimizer by path; each number of them is one of float64."""
    variables = (*model.weights, *model.optimizer.variables)
    return {v.path: keras.ops.convert_to_numpy(v).astype("float64") for v in variables}


TRAIN = """
import sys, numpy
from tests.orbax import test_orbax as program
model = program.build()
callback = program.keras.callbacks.OrbaxCheckpoint(sys.argv[1], save_on_background=False)
program.fit(model, callback)
numpy.savez(sys.argv[2], **program.state(model))
"""


@pytest.fixture(scope="module", params=["torch", "jax"])
def written(request, tmp_path_factory):
    """A folder of plain Keras, in a process of its own, and the values in it."""
    folder = tmp_path_factory.mktemp(request.param)
    environment = os.environ | {"KERAS_BACKEND": request.param}
    program = [sys.executable, "-W", "ignore", "-c", TRAIN, folder / "orbax", folder / "values.npz"]
    subprocess.run(program, check=True, env=environment)
    return folder / "orbax", dict(np.load(folder / "values.npz"))


@pytest.mark.parametrize("shape", [(1, 1), (1, 2), (2, 1), (2, 2)])
def test_a_folder_of_one_process_is_read_on_any_mesh(written, shape):
    folder, expected = written

    def read(_rank):
        distribute(shape, rules=RULES)
        model = build(seed=2)
        report = shardcore.load_orbax(model, folder)
        return report, state(model)

    results = run_ranks(read, shape[0] * shape[1])
    for report, values in results:
        assert Path(report.path).name == "1"
        assert (report.problems, report.unused) == ((), ())
        assert values.keys() == expected.keys()
        for path, value in expected.items():
            np.testing.assert_array_equal(values[path], value, path)
