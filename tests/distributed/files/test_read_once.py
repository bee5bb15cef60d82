"""Each byte of a file is read once per host, whatever is replicated; and the memory of that."""

import io
import os
import socket
from pathlib import Path

import keras
import numpy as np
import pytest
import safetensors.numpy
import torch
from torch.distributed import checkpoint

import shardcore
from benchmarks import memory
from shardcore.testing import run_ranks
from tests.distributed.files.files_of_others import distribute

LAYERS, SIZE, MIB = 4, 512, 2**20  # four kernels of 1 MiB
RULES = {"sharded_.*/kernel": (None, "model")}
KEYS = {f"net/{kind}_{n}/kernel": f"{kind}.{n}" for kind in ("sharded", "whole") for n in (0, 1)}


def values(size):
    rng = np.random.default_rng(1)
    return {key: rng.random((size, size), dtype="float32") for key in KEYS.values()}


def build(size=SIZE):
    dense = [
        keras.layers.Dense(
            size, use_bias=False, name=path.split("/")[1], kernel_initializer="zeros"
        )
        for path in KEYS
    ]
    return keras.Sequential([keras.Input((size,)), *dense], name="net")


def write(kind, folder, size=SIZE):
    """Writes the files in one process: each tensor is one chunk."""
    if kind == "safetensors":
        safetensors.numpy.save_file(values(size), folder / "model.safetensors")
    else:
        state = {key: torch.from_numpy(value) for key, value in values(size).items()}
        checkpoint.save(state, checkpoint_id=folder)


def load(kind, model, folder):
    return getattr(shardcore, f"load_{kind}")(model, folder, KEYS)


def count_reads(monkeypatch):
    """Counts the bytes that this process reads from files: of safetensors, and of torch."""
    counts, preadv, open_file = [], os.preadv, Path.open

    class Counted(io.FileIO):
        def readinto(self, buffer):
            counts.append(super().readinto(buffer))
            return counts[-1]

    def counted(*args):
        counts.append(preadv(*args))
        return counts[-1]

    def opened(path, mode="r", *args, **kwargs):
        is_data = path.suffix == ".distcp"
        return (
            io.BufferedReader(Counted(path)) if is_data else open_file(path, mode, *args, **kwargs)
        )

    monkeypatch.setattr(os, "preadv", counted)
    monkeypatch.setattr(Path, "open", opened)
    return counts


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("kind", ["safetensors", "dcp"])
@pytest.mark.parametrize("shape", [(2, 1), (1, 2), (2, 2)])
def test_the_ranks_of_a_host_read_each_byte_once(tmp_path, monkeypatch, kind, shape):
    write(kind, tmp_path)

    def read(_rank):
        distribute(shape, rules=RULES)
        model = build()
        counts = count_reads(monkeypatch)
        report = load(kind, model, tmp_path)
        return sum(counts), report.bytes_read, model.get_weights()

    results = run_ranks(read, shape[0] * shape[1])
    for _, _, weights in results:
        for weight, expected in zip(weights, values(SIZE).values(), strict=True):
            np.testing.assert_array_equal(weight, expected)
    total = sum(value.nbytes for value in values(SIZE).values())
    assert sum(reported for _, reported, _ in results) == total
    # Torch stores each chunk as a zip archive, and reads parts of its directory again.
    assert (
        total <= sum(counted for counted, _, _ in results) <= (1.15 if kind == "dcp" else 1) * total
    )
    assert max(reported for _, reported, _ in results) < 0.8 * total  # the ranks share the work


def test_each_host_reads_the_file_by_itself(tmp_path, monkeypatch):
    write("safetensors", tmp_path)

    def read(rank):
        monkeypatch.setattr(socket, "gethostname", lambda: f"host-{rank // 2}")
        distribute((4, 1), rules=RULES)
        model = build()
        report = load("safetensors", model, tmp_path)
        return report.bytes_read, model.get_weights()

    results = run_ranks(read, 4)
    total = sum(value.nbytes for value in values(SIZE).values())
    assert [results[n][0] + results[n + 1][0] for n in (0, 2)] == [total, total]
    for _, weights in results:
        for weight, expected in zip(weights, values(SIZE).values(), strict=True):
            np.testing.assert_array_equal(weight, expected)


@pytest.mark.parametrize("failing", [0, 1])
def test_a_rank_that_cannot_read_ends_the_load_on_all(tmp_path, failing):
    write("safetensors", tmp_path)

    def read(rank):
        distribute((2, 1), rules=RULES)
        model = build()
        if rank == failing:
            os.preadv = None
        with pytest.raises(TypeError, match="NoneType"):
            load("safetensors", model, tmp_path)

    run_ranks(read, 2)


def test_a_function_that_fails_on_values_leaves_the_variables_before_it(tmp_path):
    write("safetensors", tmp_path)

    def fail_on_values(tensor):
        if not tensor.is_meta:
            raise RuntimeError("these values")
        return tensor

    def read(_rank):
        distribute((1, 2), rules=RULES)
        model = build()
        keys = KEYS | {"net/sharded_1/kernel": ("sharded.1", fail_on_values)}
        with pytest.raises(RuntimeError, match="these values"):
            shardcore.load_safetensors(model, tmp_path, keys)
        return [float(np.abs(weight).sum()) > 0 for weight in model.get_weights()]

    assert run_ranks(read, 2) == [[True, False, False, False]] * 2


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("kind", ["safetensors", "dcp"])
def test_a_rank_has_room_for_its_shards_and_one_variable(tmp_path, kind):
    write(kind, tmp_path, 2048)
    write_small = tmp_path / "small"
    write_small.mkdir()
    write(kind, write_small)

    def grown(_rank):
        distribute((1, 2), rules=RULES)
        load(kind, build(), write_small)  # imports what it needs
        memory.map_large_blocks()
        memory.begin()
        model = []

        def make_and_load():
            model.append(build(2048))
            load(kind, model[0], tmp_path)

        return memory.peak(make_and_load)["process"] / MIB

    shards, variable = 2 * 16 + 2 * 8, 16
    assert max(run_ranks(grown, 2)) < 1.15 * (shards + variable)


def test_a_model_without_a_distribution_reads_and_writes_too(tmp_path):
    write("safetensors", tmp_path)

    def there_and_back(_rank):
        shardcore.install()
        model = build()
        report = load("safetensors", model, tmp_path)
        shardcore.save_safetensors(model, tmp_path / "a.safetensors", KEYS)
        return report.bytes_read

    (count,) = run_ranks(there_and_back, 1)
    assert count == sum(value.nbytes for value in values(SIZE).values())
    saved = safetensors.numpy.load_file(tmp_path / "a.safetensors")
    for key, value in values(SIZE).items():
        np.testing.assert_array_equal(saved[key], value)
