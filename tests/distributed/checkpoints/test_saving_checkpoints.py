"""Saving sharded checkpoints: failures, and what a crash has left."""

import os
import time

import keras
import numpy as np
import pytest
import torch
from keras import layers

import shardcore
from shardcore.testing import RankFailed, run_ranks
from tests.distributed.checkpoints.checkpointed import COLUMNS, X, Y, build, distribute


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
