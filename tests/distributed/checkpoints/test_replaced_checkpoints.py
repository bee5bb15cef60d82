"""A step that is saved again: at every moment of it a complete checkpoint of the step exists."""

import os
import shutil
import signal

import keras
import numpy as np
import pytest

import shardcore
from shardcore import cli
from shardcore.domain.errors import CheckpointError
from shardcore.testing import RankFailed, run_ranks

STEP = "step-00000007"
# A save of a step that is complete calls these functions so often, and each may be the last call.
CHANGES = ("rename", "unlink")


def build(value):
    shardcore.install("dtensor")
    mesh = keras.distribution.DeviceMesh((1, 1), ("data", "model"))
    rules = keras.distribution.LayoutMap(mesh)
    keras.distribution.set_distribution(keras.distribution.ModelParallel(layout_map=rules))
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])
    model.set_weights([np.full_like(each, value) for each in model.get_weights()])
    return model


def save_and_die(rank, folder, name, number):
    """Saves values 1, then values 2 for the same step; dies in the `number`-th call of `name`."""
    shardcore.save_checkpoint(folder, build(1), step=7, keep=1)
    model, calls, original = build(2), 0, getattr(os, name)

    def counted(*args, **kwargs):
        nonlocal calls
        calls += 1
        if calls == number:
            os.kill(os.getpid(), signal.SIGKILL)
        return original(*args, **kwargs)

    setattr(os, name, counted)
    shardcore.save_checkpoint(folder, model, step=7, keep=1)
    return calls


def value_in(folder):
    model = build(0)
    shardcore.load_checkpoint(folder, model)
    return float(np.unique(np.concatenate([each.ravel() for each in model.get_weights()])).item())


def look(rank, folder):
    """Returns what each reader finds, then saves once more."""
    shardcore.install()
    latest = shardcore.latest_checkpoint(folder)
    values = {value_in(place) for place in (folder, folder / STEP, latest)}
    for place in (folder, folder / STEP):
        assert cli.main(["checkpoint", "inspect", str(place)]) == 0
        assert cli.main(["checkpoint", "verify", str(place)]) == 0
        target = folder.with_suffix(".safetensors")
        assert cli.main(["checkpoint", "convert", str(place), str(target)]) == 0
        target.unlink()
    shardcore.save_checkpoint(folder, build(3), step=7, keep=1)
    return values, value_in(folder), os.listdir(folder)


@pytest.mark.parametrize("name", CHANGES)
def test_a_process_that_dies_in_any_change_of_a_folder_leaves_a_checkpoint(name, tmp_path):
    number, values, calls = 1, set(), 0
    while not calls:
        folder = tmp_path / str(number)
        try:
            calls = run_ranks(save_and_die, 1, folder, name, number)[0]
        except RankFailed:
            found, last, names = run_ranks(look, 1, folder)[0]
            assert len(found) == 1
            assert found <= {1.0, 2.0}
            assert (last, names) == (3.0, [STEP])
            values |= found
            number += 1
    assert calls == number - 1 >= 1
    if name == "rename":
        assert values == {1.0, 2.0}


def test_a_rename_that_fails_leaves_the_checkpoint_its_name(tmp_path):
    def save(rank):
        shardcore.save_checkpoint(tmp_path, build(1), step=7)
        model, rename = build(2), os.rename

        def failing(source, target):
            if str(source).endswith(f".unfinished-{STEP}"):
                raise OSError(122, "Disk quota exceeded")
            rename(source, target)

        os.rename = failing
        with pytest.raises(OSError, match="quota"):
            shardcore.save_checkpoint(tmp_path, model, step=7)
        return os.listdir(tmp_path), value_in(tmp_path)

    assert run_ranks(save, 1) == [([STEP], 1.0)]


def test_a_damaged_new_one_gives_way_to_the_one_that_it_replaced(tmp_path):
    def save(rank):
        shardcore.save_checkpoint(tmp_path, build(1), step=7)
        shutil.copytree(tmp_path / STEP, tmp_path / f".replaced-{STEP}")
        (tmp_path / STEP / "index.json").write_text("{")
        before = value_in(tmp_path)
        shardcore.save_checkpoint(tmp_path, build(2), step=8)
        return before, sorted(os.listdir(tmp_path)), value_in(tmp_path / STEP)

    assert run_ranks(save, 1) == [(1.0, [STEP, "step-00000008"], 1.0)]


def test_a_checkpoint_that_was_moved_and_linked_is_replaced_or_not_kept_as_a_link(tmp_path):
    def save(rank):
        folder, disk = tmp_path / "checkpoints", tmp_path / "disk"
        disk.mkdir()
        for step in (1, 2):
            shardcore.save_checkpoint(folder, build(step), step=step)
            name = f"step-{step:08d}"
            os.rename(folder / name, disk / name)
            os.symlink(disk / name, folder / name)
        os.symlink(tmp_path / "nowhere", folder / "step-00000000")
        assert value_in(folder) == 2.0
        shardcore.save_checkpoint(folder, build(3), step=2)  # replaces a link
        shardcore.save_checkpoint(folder, build(4), step=3, keep=2)  # removes one
        return sorted(os.listdir(folder)), [value_in(each) for each in sorted(disk.iterdir())]

    assert run_ranks(save, 1) == [(["step-00000000", "step-00000002", "step-00000003"], [1.0, 2.0])]


def test_a_file_that_has_the_name_of_a_step_is_an_error_of_the_load(tmp_path):
    def load(rank):
        (tmp_path / STEP).write_text("")
        with pytest.raises(CheckpointError, match="no complete checkpoint"):
            value_in(tmp_path / STEP)

    run_ranks(load, 1)
