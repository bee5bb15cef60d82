"""Folders of `torch.distributed.checkpoint`: written and read on any mesh, and by plain torch."""

import os
import subprocess
import sys

import keras
import numpy as np
import pytest
import torch
from torch.distributed import checkpoint

import shardcore
from shardcore.domain.errors import CheckpointError
from shardcore.testing import run_ranks
from tests.distributed.files.files_of_others import (
    KEYS,
    bits_of,
    build,
    build_small,
    distribute,
    small_values,
    tensors,
)

PLAIN = """
import sys, torch
from torch.distributed import checkpoint
metadata = checkpoint.FileSystemReader(sys.argv[1]).read_metadata().state_dict_metadata
state = {key: torch.empty(found.size, dtype=found.properties.dtype)
         for key, found in metadata.items()}
checkpoint.load(state, checkpoint_id=sys.argv[1])
assert "shardcore" not in sys.modules
torch.save(state, sys.argv[2])
"""


def read_by_plain_torch(folder, target):
    program = [sys.executable, "-W", "ignore", "-c", PLAIN, str(folder), str(target)]
    subprocess.run(program, check=True)
    return torch.load(target)


def load(shape, strategy, folder):
    def read(_rank):
        distribute(shape, strategy)
        model = build()
        report = shardcore.load_dcp(model, folder, KEYS)
        return model.get_weights(), report

    for values, report in run_ranks(read, shape[0] * shape[1]):
        assert report.variables == tuple(KEYS)
        for value, expected in zip(values, tensors()[1], strict=True):
            np.testing.assert_array_equal(value, expected)


@pytest.mark.parametrize(
    ("shape", "strategy"), [((1, 1), "dtensor"), ((1, 2), "manual"), ((2, 2), "dtensor")]
)
def test_what_a_mesh_has_written_others_read_and_so_does_plain_torch(tmp_path, shape, strategy):
    files, weights = tensors()

    def write(_rank):
        distribute(shape, strategy)
        model = build()
        model.set_weights(weights)
        shardcore.save_dcp(model, tmp_path / "dcp", KEYS)

    run_ranks(write, shape[0] * shape[1])
    for key, value in read_by_plain_torch(tmp_path / "dcp", tmp_path / "state.pt").items():
        np.testing.assert_array_equal(value, files.pop(key))
    assert not files
    load((2, 2) if shape != (2, 2) else (1, 1), "dtensor", tmp_path / "dcp")
    load((2, 1), "manual", tmp_path / "dcp")


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_what_plain_torch_has_written_a_mesh_reads(tmp_path):
    state = {key: torch.from_numpy(value) for key, value in tensors()[0].items()}
    checkpoint.save(state, checkpoint_id=tmp_path / "dcp")
    load((2, 2), "dtensor", tmp_path / "dcp")


def test_small_types_keep_their_bits(tmp_path):
    values = small_values()
    keys = lambda path: (path.rpartition("/")[2], "a b -> b a")  # noqa: E731

    def there_and_back(_rank):
        distribute((2, 1), rules={"small/.*": (None, "data")})
        model = build_small()
        for variable in model.weights:
            variable.assign(values[variable.path.rpartition("/")[2]])
        before = bits_of(model)
        shardcore.save_dcp(model, tmp_path / "dcp", keys)
        other = build_small()
        shardcore.load_dcp(other, tmp_path / "dcp", keys)
        return before, bits_of(other)

    for before, after in run_ranks(there_and_back, 2):
        assert before == after
    for name, value in read_by_plain_torch(tmp_path / "dcp", tmp_path / "state.pt").items():
        assert torch.equal(value.T.contiguous().view(torch.uint8), values[name].view(torch.uint8))


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_wrong_folders_are_errors_on_all_ranks_and_change_nothing(tmp_path):
    state = {key: torch.from_numpy(value) for key, value in tensors()[0].items()}
    state["embed.weight"] = state["embed.weight"][:3].clone()
    state["step"] = 3
    del state["o_proj.bias"]
    checkpoint.save({"model": state}, checkpoint_id=tmp_path / "wrong")
    os.makedirs(tmp_path / "empty")

    def read(_rank):
        distribute((1, 2))
        model = build()
        before = bits_of(model)
        with pytest.raises(CheckpointError, match="no complete checkpoint of torch"):
            shardcore.load_dcp(model, tmp_path / "empty", KEYS)
        with pytest.raises(CheckpointError, match="is not empty"):
            shardcore.save_dcp(model, tmp_path / "wrong", KEYS)
        nested = {path: _below_model(key) for path, key in KEYS.items()}
        with pytest.raises(CheckpointError) as error:
            shardcore.load_dcp(model, tmp_path / "wrong", nested)
        assert bits_of(model) == before
        report = shardcore.load_dcp(model, tmp_path / "wrong", nested, strict=False)
        return str(error.value), report.variables

    (one, loaded), (other, _) = run_ranks(read, 2)
    assert one == other
    assert "has shape (3, 6) in the file, expected (8, 6)" in one
    assert "'out/bias' from 'model.o_proj.bias' is not in the files" in one
    assert "'model.step' of the files has no variable" in one
    assert loaded == ("query/kernel", "query/bias", "out/kernel")


def _below_model(key):
    return (f"model.{key[0]}", key[1]) if isinstance(key, tuple) else f"model.{key}"


def test_an_error_of_one_rank_is_one_of_all_and_leaves_no_folder(tmp_path):
    def write(rank):
        distribute((1, 2))
        model = build()
        if rank == 1:
            torch.save = None
        with pytest.raises(Exception, match="NoneType"):
            shardcore.save_dcp(model, tmp_path / "dcp", KEYS)

    run_ranks(write, 2)
    assert not (tmp_path / "dcp").exists()


def test_a_refused_folder_keeps_its_files(tmp_path):
    (tmp_path / "letter.txt").write_text("mine")

    def write(_rank):
        distribute((1, 2))
        with pytest.raises(CheckpointError, match="is not empty"):
            shardcore.save_dcp(build(), tmp_path, KEYS)

    run_ranks(write, 2)
    assert (tmp_path / "letter.txt").read_text() == "mine"


def test_a_missing_file_is_an_error_on_all_ranks_and_changes_nothing(tmp_path):
    def read(rank):
        distribute((1, 2))
        model = build()
        folder = shardcore.save_dcp(model, tmp_path / "dcp", KEYS)
        if rank == 0:
            sorted(folder.glob("*.distcp"))[-1].unlink()
        shardcore.agree(True)
        other = build()
        before = bits_of(other)
        with pytest.raises(CheckpointError, match="distcp', which is missing"):
            shardcore.load_dcp(other, folder, KEYS)
        assert bits_of(other) == before

    run_ranks(read, 2)


def test_a_scalar_is_written_and_read(tmp_path):
    def there_and_back(_rank):
        distribute((1, 2))
        model = keras.Sequential([keras.Input((2,)), keras.layers.BatchNormalization()])
        model.scalar = model.add_weight((), name="scalar", initializer="ones", trainable=False)
        folder = shardcore.save_dcp(model, tmp_path / "dcp")
        model.scalar.assign(3.0)
        shardcore.load_dcp(model, folder)
        return float(model.scalar)

    assert run_ranks(there_and_back, 2) == [1.0, 1.0]
