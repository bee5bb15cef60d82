"""Sharded checkpoints: saved on one mesh, loaded on another, and what is refused."""

import json
import os
import shutil
import time

import keras
import numpy as np
import pytest
import safetensors.numpy
import torch
from keras import layers

import shardcore
from shardcore.domain.errors import CheckpointError
from shardcore.testing import RankFailed, run_ranks

RNG = np.random.default_rng(0)
X = RNG.normal(size=(24, 6)).astype("float32")
Y = RNG.integers(0, 4, 24)


def distribute(shape, strategy="dtensor", rules=None):
    shardcore.install(strategy)
    mesh = keras.distribution.DeviceMesh(shape, ("data", "model"))
    layout_map = keras.distribution.LayoutMap(mesh)
    for key, spec in (rules or {}).items():
        layout_map[key] = spec
    keras.distribution.set_distribution(
        keras.distribution.ModelParallel(layout_map=layout_map, batch_dim_name="data")
    )


COLUMNS = {".*hidden.*kernel": (None, "model"), ".*digits.*kernel": ("model", None)}
ROWS = {".*hidden.*kernel": ("data", None), ".*digits.*kernel": (("data", "model"), None)}


def build():
    keras.utils.set_random_seed(3)
    model = keras.Sequential(
        [
            keras.Input((6,)),
            layers.Dense(10, "relu", name="hidden"),
            layers.BatchNormalization(),
            layers.Dropout(0.3),
            layers.Dense(4, name="digits"),
        ]
    )
    rate = keras.optimizers.schedules.ExponentialDecay(0.05, 3, 0.5)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(rate), loss, metrics=["accuracy"])
    return model


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


def test_a_write_that_fails_on_one_rank_is_an_error_on_all_and_leaves_the_latest(tmp_path):
    def save(rank):
        distribute((1, 2), rules=COLUMNS)
        model = build()
        first = shardcore.save_checkpoint(tmp_path, model, step=1)
        if rank == 1:
            os.fsync = lambda descriptor: raise_full()
        with pytest.raises(OSError, match="No space left"):
            shardcore.save_checkpoint(tmp_path, model, step=2)
        assert shardcore.latest_checkpoint(tmp_path) == first
        return sorted(os.listdir(tmp_path))

    def raise_full():
        raise OSError(28, "No space left on device")

    assert run_ranks(save, 2) == [["step-00000001"]] * 2


def test_ranks_that_save_other_things_are_an_error(tmp_path):
    def save(rank):
        distribute((1, 2), rules=COLUMNS)
        shardcore.save_checkpoint(tmp_path, build(), step=rank)

    with pytest.raises(RankFailed, match="Ranks disagree on checkpoint step"):
        run_ranks(save, 2)


def test_a_save_on_one_rank_only_is_an_error(tmp_path, monkeypatch):
    monkeypatch.setenv("SHARDCORE_TIMEOUT", "2")

    def save(rank):
        distribute((1, 2), rules=COLUMNS)
        model = build()
        if rank == 0:
            shardcore.save_checkpoint(tmp_path, model, step=1)
        time.sleep(20)

    with pytest.raises(
        RankFailed, match=r"save_checkpoint\(\) .*waits for rank 1, which did not come"
    ):
        run_ranks(save, 2)
    assert os.listdir(tmp_path) == []


def test_processes_without_a_distribution_are_refused(tmp_path):
    def save(rank):
        shardcore.install("dtensor")
        keras.distribution.initialize()
        shardcore.save_checkpoint(tmp_path, build(), step=1)

    with pytest.raises(RankFailed, match="2 processes without a distribution"):
        run_ranks(save, 2)


def test_what_a_crash_has_left_is_skipped_then_removed_and_keep_counts_complete_ones(tmp_path):
    def save(rank):
        distribute((1, 1))
        model = build()
        for step in (1, 2, 3):
            shardcore.save_checkpoint(tmp_path, model, step=step)
        (tmp_path / "step-00000003" / "index.json").write_text("{")
        (tmp_path / ".unfinished-step-00000009").mkdir()
        latest = shardcore.latest_checkpoint(tmp_path)
        shardcore.save_checkpoint(tmp_path, model, step=4, keep=2)
        return latest.name, sorted(os.listdir(tmp_path))

    # the damaged one is no complete one, so it is neither counted nor removed
    assert run_ranks(save, 1) == [
        ("step-00000002", ["step-00000002", "step-00000003", "step-00000004"])
    ]


def test_torch_modules_lora_and_seeds_are_restored(tmp_path):
    def model_of():
        keras.utils.set_random_seed(5)
        norm = torch.nn.BatchNorm1d(6)
        dense = layers.Dense(4, name="digits")
        model = keras.Sequential([keras.Input((6,)), layers.TorchModuleWrapper(norm), dense])
        model(X)
        dense.enable_lora(2)
        model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
        return model

    def state(model):
        buffers = [keras.ops.convert_to_numpy(each) for each in model.layers[0].module.buffers()]
        return [v.numpy() for v in model.variables] + buffers

    def run(rank, load):
        distribute((1, 2))
        model = model_of()
        keras.random.uniform((1,))  # makes the seed of random functions without one
        if load:
            keras.random.uniform((7,))
            shardcore.load_checkpoint(tmp_path, model)
        else:
            model.train_on_batch(X, Y)
            shardcore.save_checkpoint(tmp_path, model, step=1)
        return state(model), keras.random.uniform((3,)).tolist()

    (saved, drawn), _ = run_ranks(run, 2, False)
    for found, again in run_ranks(run, 2, True):
        assert again == drawn
        for one, other in zip(found, saved, strict=True):
            np.testing.assert_array_equal(one, other)
