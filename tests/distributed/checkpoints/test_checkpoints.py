"""Sharded checkpoints: saved on one mesh, loaded on another; another model is refused."""

import json
import os
import shutil

import keras
import numpy as np
import pytest
import safetensors.numpy
from keras import layers

import shardcore
from shardcore.domain.errors import CheckpointError
from shardcore.testing import run_ranks
from tests.distributed.checkpoints.checkpointed import COLUMNS, X, Y, build, distribute

ROWS = {".*hidden.*kernel": ("data", None), ".*digits.*kernel": (("data", "model"), None)}


def train(model, epochs):
    return model.fit(X, Y, batch_size=8, epochs=epochs, verbose=0).history["loss"]


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A checkpoint of a (2, 2) mesh after an epoch, the values then, and the losses after it."""
    directory = tmp_path_factory.mktemp("checkpoints")

    def save(rank):
        distribute((2, 2), rules=COLUMNS)
        model = build()
        train(model, 1)
        shardcore.save_checkpoint(directory, model, step=3, state={"epoch": 1})
        values = model.get_weights(), [v.numpy() for v in model.optimizer.variables]
        return values, train(model, 1)

    (values, losses), *_ = run_ranks(save, 4)
    return directory, values, losses


@pytest.mark.parametrize(
    ("ranks", "shape", "strategy", "rules"),
    [
        (4, (4, 1), "dtensor", ROWS),
        (4, (2, 2), "manual", ROWS),
        (2, (1, 2), "manual", COLUMNS),
        (2, (2, 1), "dtensor", {}),
        (1, (1, 1), "dtensor", COLUMNS),
        (1, None, "single", {}),
    ],
)
def test_another_mesh_goes_on_as_if_nothing_had_happened(saved, ranks, shape, strategy, rules):
    directory, (weights, optimizer), losses = saved

    def resume(rank):
        if shape is None:
            shardcore.install(strategy)
        else:
            distribute(shape, strategy, rules)
        keras.layers.Dense(1)  # moves the numbers that Keras gives to names
        model = build()
        model.evaluate(X, Y, batch_size=8, verbose=0)  # as fit would, makes the metrics
        report = shardcore.load_checkpoint(directory, model)
        values = model.get_weights(), [v.numpy() for v in model.optimizer.variables]
        return report, values, train(model, 1)

    for report, values, following in run_ranks(resume, ranks):
        assert (report.step, report.state, report.problems) == (3, {"epoch": 1}, ())
        for mine, theirs in zip(values, (weights, optimizer), strict=True):
            for one, other in zip(mine, theirs, strict=True):
                np.testing.assert_array_equal(one, other)
        np.testing.assert_allclose(following, losses, rtol=1e-5)


def test_each_rank_reads_the_bytes_that_it_keeps_and_no_others(saved, monkeypatch):
    directory, _, _ = saved

    def count(rank):
        distribute((1, 2), rules=COLUMNS)
        model = build()
        model.evaluate(X, Y, batch_size=8, verbose=0)
        read = []
        preadv = os.preadv

        def counted(descriptor, buffers, offset):
            read.append(preadv(descriptor, buffers, offset))
            return read[-1]

        monkeypatch.setattr(os, "preadv", counted)
        report = shardcore.load_checkpoint(directory, model)
        kept = sum(each.bytes_here for each in shardcore.verify(model).variables)
        return sum(read), report.bytes_read, kept

    for read, reported, kept in run_ranks(count, 2):
        assert read == reported == kept


def test_replicated_values_are_written_once_and_by_all_ranks(saved):
    directory, (weights, _), _ = saved
    folder = shardcore_folder(directory)
    index = json.loads((folder / "index.json").read_text())["content"]
    found, shares = {}, []
    for file in index["files"]:
        tensors = safetensors.numpy.load_file(folder / file["name"])
        assert tensors  # each rank writes some
        assert not found.keys() & tensors.keys()
        found |= tensors
        shares.append(sum(array.nbytes for array in tensors.values()))
    assert max(shares) - min(shares) <= max(array.nbytes for array in found.values())
    values = sum(array.nbytes for array in found.values())
    assert values == sum(
        int(np.prod(each["shape"])) * found[key_of(each, found)].itemsize
        for each in index["variables"]
    )
    np.testing.assert_array_equal(
        np.hstack(
            [found["layers/dense/vars/0[0:6, 0:5]"], found["layers/dense/vars/0[0:6, 5:10]"]]
        ),
        weights[0],
    )


def key_of(variable, found):
    return next(key for key in found if key.split("[")[0] == variable["name"])


def shardcore_folder(directory):
    (folder,) = [each for each in directory.iterdir() if each.name.startswith("step-")]
    return folder


def values_of(model):
    return [v.numpy() for v in (*model.variables, *model.optimizer.variables)]


def refused(directory, message, other=build, ranks=2):
    """Loads on all ranks, and checks that all raise and that no value has changed."""

    def load(rank):
        distribute((1, ranks), rules=COLUMNS)
        model = other()
        model.optimizer.build(model.trainable_variables)
        before = values_of(model)
        with pytest.raises(CheckpointError, match=message):
            shardcore.load_checkpoint(directory, model)
        for one, other_value in zip(before, values_of(model), strict=True):
            np.testing.assert_array_equal(one, other_value)

    run_ranks(load, ranks)


def test_another_model_is_an_error_that_names_the_variables(saved):
    def other():
        model = build()
        wider = keras.Sequential([*model.layers[:-1], layers.Dense(5, name="digits")])
        wider.build((None, 6))
        wider.compile("adam", "mse")
        return wider

    directory, (weights, _), _ = saved
    refused(directory, r"'layers/dense_1/vars/0' \(.*digits/kernel\) has shape \(10, 5\)", other)

    def load(rank):
        distribute((1, 2), rules=COLUMNS)
        model = other()
        report = shardcore.load_checkpoint(directory, model, strict=False)
        return report, model.layers[0].get_weights(), model.name

    for report, hidden, name in run_ranks(load, 2):
        np.testing.assert_array_equal(hidden[0], weights[0])
        assert f"'layers/dense_1/vars/1' ({name}/digits/bias) has shape (5,)" in report.problems[1]
        assert "layers/dense/vars/0" in report.variables


def flip(file):
    content = bytearray(file.read_bytes())
    content[-5] ^= 4
    file.write_bytes(content)


DAMAGES = {
    "a bit is flipped": (flip, "checksum differs"),
    "a file is cut": (lambda file: os.truncate(file, file.stat().st_size - 1), "bytes, not"),
    "a file is missing": (lambda file: file.unlink(), "rank-00001"),
    "the index is missing": (lambda file: (file.parent / "index.json").unlink(), "no complete"),
    "a file is in the place of another": (
        lambda file: shutil.copy(file.with_name("rank-00000.safetensors"), file),
        "bytes, not|checksum differs",
    ),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_checkpoint_is_an_error_on_all_ranks(saved, tmp_path, damage):
    folder = shutil.copytree(shardcore_folder(saved[0]), tmp_path / "step-00000003")
    change, message = DAMAGES[damage]
    change(folder / "rank-00001.safetensors")
    refused(folder, message)
