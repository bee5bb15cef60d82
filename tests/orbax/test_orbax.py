"""Folders of Keras' `OrbaxCheckpoint`, over ranks: `make orbax` runs them, with the package."""

import os
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import keras
import numpy as np
import pytest

import shardcore
from benchmarks import memory
from shardcore.domain.errors import CheckpointError
from shardcore.testing import run_ranks
from tests.distributed.files.files_of_others import distribute

pytestmark = pytest.mark.skipif(find_spec("orbax") is None, reason="make orbax has the package")

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
    """A folder that another process with plain Keras has written, and the values in it."""
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


def test_the_ranks_of_a_host_read_each_chunk_once(written):
    folder, _ = written

    def read(_rank):
        distribute((2, 1), rules=RULES)
        return shardcore.load_orbax(build(), folder).bytes_read

    def alone(_rank):
        shardcore.install()
        return shardcore.load_orbax(build(), folder).bytes_read

    assert sum(run_ranks(read, 2)) == run_ranks(alone, 1)[0]


def test_a_rank_has_room_for_its_shards_and_three_chunks(tmp_path):
    environment = os.environ | {"KERAS_BACKEND": "torch"}
    program = [sys.executable, "-W", "ignore", "-c", SAVE, tmp_path]
    subprocess.run(program, check=True, env=environment)

    def grown(_rank):
        distribute((1, 2), rules={"wide/kernel": (None, "model"), "deep/kernel": ("model", None)})
        shardcore.load_orbax(large(64), tmp_path / "64")  # imports what it needs
        memory.map_large_blocks()
        memory.begin()
        model = large(2048)
        before = bytes_read()
        peak = memory.peak(lambda: shardcore.load_orbax(model, tmp_path / "2048"))
        return peak["process"] / MIB, bytes_read() - before

    results = run_ranks(grown, 2)
    assert max(peak for peak, _ in results) < 16 + 3 * 16 + 4
    size = sum(file.stat().st_size for file in (tmp_path / "2048").rglob("*") if file.is_file())
    assert sum(count for _, count in results) < 1.05 * size


SAVE = """
import sys
from tests.orbax import test_orbax as program
for size in (64, 2048):
    model = program.large(size)
    callback = program.keras.callbacks.OrbaxCheckpoint(
        f"{sys.argv[1]}/{size}", save_on_background=False)
    callback.set_model(model)
    callback._save_checkpoint(0)
"""


def large(size):
    keras.utils.set_random_seed(1)
    layers = [keras.layers.Dense(size, use_bias=False, name=name) for name in ("wide", "deep")]
    model = keras.Sequential([keras.Input((size,)), *layers], name="net")
    model.compile("sgd", "mse")
    model.optimizer.build(model.trainable_variables)
    return model


def bytes_read():
    """The bytes that this process has read from files, as the kernel counts them."""
    lines = Path("/proc/self/io").read_text().splitlines()
    return int(lines[0].removeprefix("rchar: "))


def test_wrong_and_damaged_folders_are_errors_on_all_ranks(written, tmp_path):
    folder, _ = written
    shutil.copytree(folder / "1", tmp_path / "cut" / "1")
    for file in (tmp_path / "cut" / "1" / "pytree").rglob("d/*"):
        file.write_bytes(b"")
    shutil.copytree(folder / "1", tmp_path / "text" / "1")
    (tmp_path / "text" / "1" / "pytree" / "_METADATA").write_text("{}")

    def read(_rank):
        distribute((1, 2), rules=RULES)
        model, messages = build(), []
        before = state(model)
        for path in (tmp_path / "cut", tmp_path / "text", tmp_path):
            with pytest.raises(CheckpointError) as error:
                shardcore.load_orbax(model, path)
            messages.append(str(error.value))
        with pytest.raises(CheckpointError) as error:
            shardcore.load_orbax(build(size=10), folder)
        after = state(model)
        assert all(np.array_equal(after[path], value) for path, value in before.items())
        return [*messages, str(error.value)]

    one, other = run_ranks(read, 2)
    assert one == other
    for message, part in zip(
        one, ("is no folder", "is no folder", "has no file", "expected (6, 10)"), strict=True
    ):
        assert part in message


def test_a_folder_of_weights_alone_is_loaded_if_not_strict(tmp_path):
    def write_and_read(_rank):
        shardcore.install()
        model = build()
        callback = keras.callbacks.OrbaxCheckpoint(
            tmp_path, save_weights_only=True, save_on_background=False
        )
        fit(model, callback)
        other = build(seed=2)
        with pytest.raises(CheckpointError, match="'optimizer_variables/adam/iteration'"):
            shardcore.load_orbax(other, tmp_path)
        report = shardcore.load_orbax(other, tmp_path, strict=False)
        assert set(report.variables) >= {
            f"trainable_variables/{v.path}" for v in other.trainable_variables
        }
        for one, expected in zip(other.get_weights(), model.get_weights(), strict=True):
            np.testing.assert_array_equal(one, expected)

    run_ranks(write_and_read, 1)
