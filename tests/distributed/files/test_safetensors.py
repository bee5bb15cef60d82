"""Safetensors files of others: read and written by shards, to the bit; wrong ones are refused."""

import json
import os
import shutil

import numpy as np
import pytest
import safetensors.numpy
import safetensors.torch
import torch

import shardcore
from shardcore.domain.errors import ArgumentProblem, CheckpointError
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

MESHES = [(1, (1, 1), "dtensor"), (2, (1, 2), "dtensor"), (2, (2, 1), "manual"),
          (4, (2, 2), "dtensor"), (4, (1, 4), "manual")]  # fmt: skip


@pytest.fixture
def hub(tmp_path):
    """A folder as `save_pretrained` of Transformers writes it, in two files."""
    files, _ = tensors()
    names = {key: f"model-0000{1 + ('bias' in key)}-of-00002.safetensors" for key in files}
    for name in set(names.values()):
        part = {key: value for key, value in files.items() if names[key] == name}
        safetensors.numpy.save_file(part, tmp_path / name, metadata={"format": "pt"})
    index = {"metadata": {"total_size": 0}, "weight_map": names}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    return tmp_path


@pytest.mark.parametrize(("ranks", "shape", "strategy"), MESHES)
def test_a_host_reads_each_byte_once_and_writes_it_back(
    hub, tmp_path, monkeypatch, ranks, shape, strategy
):
    def there_and_back(_rank):
        distribute(shape, strategy)
        model = build()
        read, preadv = [], os.preadv

        def counted(*args):
            read.append(preadv(*args))
            return read[-1]

        monkeypatch.setattr(os, "preadv", counted)
        report = shardcore.load_safetensors(model, hub, KEYS)
        shardcore.save_safetensors(model, tmp_path / "one.safetensors", KEYS)
        shardcore.save_safetensors(model, tmp_path / "new", KEYS, max_shard_size=250 / 2**30)
        kept = sum(each.bytes_here for each in shardcore.verify(model).variables)
        return model.get_weights(), sum(read), report, kept

    results = run_ranks(there_and_back, ranks)
    assert sum(result[1] for result in results) == sum(v.nbytes for v in tensors()[0].values())
    for values, read, report, kept in results:
        for value, expected in zip(values, tensors()[1], strict=True):
            np.testing.assert_array_equal(value, expected)
        assert read == report.bytes_read <= kept
        assert report.variables == tuple(KEYS)
        assert (report.problems, report.unused) == ((), ())
    files, _ = tensors()
    assert sorted(os.listdir(tmp_path / "new")) == [
        *(f"model-0000{n}-of-00003.safetensors" for n in (1, 2, 3)),
        "model.safetensors.index.json",
    ]
    index = json.loads((tmp_path / "new" / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(value.nbytes for value in files.values())
    written = {}
    for key, name in index["weight_map"].items():
        with safetensors.safe_open(tmp_path / "new" / name, "np") as file:
            assert file.metadata() == {"format": "pt"}
            written[key] = file.get_tensor(key)
    for found in (written, safetensors.numpy.load_file(tmp_path / "one.safetensors")):
        assert found.keys() == files.keys()
        for key, value in files.items():
            np.testing.assert_array_equal(found[key], value)


@pytest.mark.parametrize("spec", [("model", "data"), (None, ("data", "model"))])
def test_small_types_keep_their_bits(tmp_path, spec):
    values = small_values()
    safetensors.torch.save_file(values, tmp_path / "old.safetensors")

    def there_and_back(_rank):
        distribute((2, 2), rules={"small/.*": spec})
        model = build_small()
        keys = lambda path: (path.rpartition("/")[2], "a b -> a b")  # noqa: E731
        shardcore.load_safetensors(model, tmp_path / "old.safetensors", keys)
        shardcore.save_safetensors(model, tmp_path / "new.safetensors", keys)
        return bits_of(model)

    for bits in run_ranks(there_and_back, 4):
        for path, content in bits.items():
            value = values[path.rpartition("/")[2]]
            assert content == value.contiguous().view(torch.uint8).numpy().tobytes(), path
    back = safetensors.torch.load_file(tmp_path / "new.safetensors")
    assert back.keys() == values.keys()
    for name, value in values.items():
        assert torch.equal(back[name].view(torch.uint8), value.view(torch.uint8)), name


def test_floats_are_cast_and_functions_see_the_full_tensor(tmp_path):
    files, weights = tensors()
    fused = {
        "embed.weight": torch.from_numpy(files["embed.weight"]).bfloat16(),
        "qk.weight": torch.arange(96.0).view(6, 16),
        "o_proj.weight": torch.from_numpy(files["o_proj.weight"]).half(),
    }
    safetensors.torch.save_file(fused, tmp_path / "model.safetensors")
    keys = {
        **dict.fromkeys(KEYS),
        "words/embeddings": "embed.weight",
        "query/kernel": ("qk.weight", lambda w: w[:, 8:].unflatten(1, (4, 2)) + 1),
        "out/kernel": KEYS["out/kernel"],
    }

    def load(_rank):
        distribute((1, 2))
        model = build()
        before = model.get_weights()
        report = shardcore.load_safetensors(model, tmp_path, keys)
        return before, model.get_weights(), report.variables

    for before, after, loaded in run_ranks(load, 2):
        assert loaded == ("words/embeddings", "query/kernel", "out/kernel")
        np.testing.assert_array_equal(after[0], fused["embed.weight"].float())
        np.testing.assert_array_equal(
            after[1], np.arange(96.0).reshape(6, 16)[:, 8:].reshape(6, 4, 2) + 1
        )
        np.testing.assert_array_equal(after[3], weights[3].astype("float16").astype("float32"))
        np.testing.assert_array_equal(after[4], before[4])


WRONG = [
    ({**KEYS, "out/bias": "nothing"}, ["'out/bias' from 'nothing' is not in the files",
                                           "'o_proj.bias' of the files has no variable"]),
    ({**KEYS, "no": "x"}, ["'no' of `keys` is no variable"]),
    ({"out/bias": "o_proj.bias"}, ["'query/kernel' is not in `keys`"]),
    ({**KEYS, "out/kernel": "o_proj.weight"},
     [r"has shape (6, 8) in the file, expected (8, 6)"]),
    ({**KEYS, "query/bias": ("q_proj.bias", "h d")}, ["each word once on each side"]),
    ({**KEYS, "query/bias": ("q_proj.bias", lambda w: w[:3])}, ["has shape (3,) after"]),
    ({**KEYS, "query/bias": ("q_proj.bias", lambda w: w.no)}, ["has a function that fails"]),
    ({**KEYS, "query/bias": ("q_proj.bias", lambda w: 1)}, ["gives int, expected a tensor"]),
]  # fmt: skip


def test_what_does_not_fit_is_one_error_on_all_ranks_and_changes_nothing(hub):
    def load(_rank):
        distribute((1, 2))
        model = build()
        before, messages = bits_of(model), []
        for keys, _ in WRONG:
            with pytest.raises(CheckpointError) as error:
                shardcore.load_safetensors(model, hub, keys)
            messages.append(str(error.value))
        for keys, expected in (
            (lambda path: 3, "a text as the key of"),
            (5, "`keys` to be a dict"),
        ):
            with pytest.raises(ArgumentProblem, match=f"Expected {expected}"):
                shardcore.load_safetensors(model, hub, keys)
        assert bits_of(model) == before
        report = shardcore.load_safetensors(model, hub, WRONG[0][0], strict=False)
        return messages, report

    (one, report), (other, _) = run_ranks(load, 2)
    assert one == other
    for message, (_, lines) in zip(one, WRONG, strict=True):
        for line in lines:
            assert line in message
    assert report.unused == ("o_proj.bias",)
    assert len(report.variables) == 4
    assert len(report.problems) == 1


def damage(hub, how):
    first = hub / "model-00001-of-00002.safetensors"
    index = hub / "model.safetensors.index.json"
    if how == "cut":
        first.write_bytes(first.read_bytes()[:-1])
    elif how == "header":
        first.write_bytes(b"\xff" * 100)
    elif how == "missing":
        first.unlink()
    elif how == "index":
        names = json.loads(index.read_text())["weight_map"]
        index.write_text(json.dumps({"weight_map": names | {"more": first.name}}))
    elif how == "outside":
        index.write_text(json.dumps({"weight_map": {"embed.weight": f"../{hub.name}/a"}}))
    elif how == "twice":
        index.unlink()
        shutil.copy(first, hub / "copy.safetensors")
    else:
        shutil.rmtree(hub)


DAMAGES = {
    "cut": "is no safetensors file",
    "header": "is no safetensors file",
    "missing": "which is missing: the folder is incomplete",
    "index": "'more' is in 'model-00001-of-00002.safetensors', which lacks it",
    "outside": "outside of its folder",
    "twice": "Two files in",
    "none": "has no .safetensors file",
}


def test_damaged_files_are_errors_on_all_ranks_and_change_nothing(hub, tmp_path_factory):
    folders = {}
    for how in DAMAGES:
        folders[how] = tmp_path_factory.mktemp("damaged") / how
        shutil.copytree(hub, folders[how])
        damage(folders[how], how)

    def load(_rank):
        distribute((2, 1))
        model = build()
        before, messages = bits_of(model), []
        for folder in folders.values():
            with pytest.raises((CheckpointError, FileNotFoundError)) as error:
                shardcore.load_safetensors(model, folder, KEYS)
            messages.append(str(error.value))
        assert bits_of(model) == before
        return messages

    one, other = run_ranks(load, 2)
    assert one == other
    for message, line in zip(one, DAMAGES.values(), strict=True):
        assert line in message


def test_what_cannot_be_written_is_an_error_on_all_ranks_and_leaves_no_file(tmp_path):
    os.makedirs(tmp_path / "full")
    (tmp_path / "full" / "model.safetensors").write_bytes(b"")

    def save(rank):
        distribute((1, 2))
        model = build()
        messages = []
        for keys in (
            dict.fromkeys(KEYS, "same"),
            {**KEYS, "query/bias": ("b", lambda w: w)},
            {**KEYS, "query/bias": ("b", "h d e -> h d e")},
        ):
            with pytest.raises(ArgumentProblem) as error:
                shardcore.save_safetensors(model, tmp_path / "new", keys)
            messages.append(str(error.value))
        for size in (0, "5GB", float("inf")):
            with pytest.raises(ArgumentProblem, match="a number above 0, in GB, got"):
                shardcore.save_safetensors(model, tmp_path / "new", KEYS, max_shard_size=size)
        with pytest.raises(CheckpointError, match=r"has 'model.safetensors' already"):
            shardcore.save_safetensors(model, tmp_path / "full", KEYS)
        if rank == 1:
            os.pwrite = None  # this rank cannot write
        with pytest.raises(TypeError, match="NoneType"):
            shardcore.save_safetensors(model, tmp_path / "new", KEYS)
        return messages

    one, other = run_ranks(save, 2)
    assert one == other
    lines = ("has the key of", "cannot be undone", "has 2 dims")
    assert all(line in message for message, line in zip(one, lines, strict=True))
    assert os.listdir(tmp_path / "new") == []


def test_unfinished_files_are_neither_read_nor_left(hub, tmp_path):
    folder = tmp_path / "killed"
    folder.mkdir()
    shutil.copy(next(hub.glob("*.safetensors")), folder / ".unfinished-model.safetensors")

    def program(_rank):
        distribute((1, 2))
        model = build()
        with pytest.raises(CheckpointError, match=r"has no \.safetensors file"):
            shardcore.load_safetensors(model, folder, KEYS)
        shardcore.save_safetensors(model, folder, KEYS)

    run_ranks(program, 2)
    assert [file.name for file in folder.iterdir()] == ["model.safetensors"]
