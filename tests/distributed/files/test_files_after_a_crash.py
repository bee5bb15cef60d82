"""Files after a kill or on a full disk, on one device and on several."""

import json
import os
import signal

import keras
import numpy as np
import pytest

import shardcore
from shardcore.domain.errors import CheckpointError
from shardcore.testing import RankFailed, run_ranks

X = np.random.default_rng(0).normal(size=(24, 6)).astype("float32")
EPOCHS = 3


def distribute(ranks):
    shardcore.install("single" if ranks == 1 else "dtensor")
    mesh = keras.distribution.DeviceMesh((ranks, 1), ("data", "model"))
    rules = keras.distribution.LayoutMap(mesh)
    rules[".*hidden/kernel"] = (None, "data")
    keras.distribution.set_distribution(
        keras.distribution.ModelParallel(layout_map=rules, batch_dim_name="data")
    )


def build(seed=1):
    keras.utils.set_random_seed(seed)
    model = keras.Sequential(
        [
            keras.Input((6,)),
            keras.layers.Dense(8, name="hidden"),
            keras.layers.Dropout(0.5),
            keras.layers.Dense(1),
        ]
    )
    model.compile(keras.optimizers.Adam(0.01), "mse")
    return model


def fit(model, *callbacks):
    return model.fit(X, X[:, :1], batch_size=8, epochs=EPOCHS, verbose=0, callbacks=callbacks)


def save(model, path):
    model.save(path) if path.suffix == ".keras" else model.save_weights(path)


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("name", ["kept.keras", "kept.weights.h5"])
def test_a_kill_while_saving_leaves_the_old_file_and_the_next_save_cleans_up(ranks, name, tmp_path):
    path = tmp_path / name

    def killed(rank):
        distribute(ranks)
        model = build()
        save(model, path)
        if rank == 0:
            # The weights before those of the last layer are in the unfinished file by then.
            model.layers[-1].save_own_variables = lambda store: os.kill(os.getpid(), signal.SIGKILL)
        save(model, path)

    with pytest.raises(RankFailed):
        run_ranks(killed, ranks)
    assert sorted(os.listdir(tmp_path)) == [f".unfinished-{name}", name]

    def load_and_save_again(rank):
        distribute(ranks)
        expected = build().get_weights()
        model = build(seed=2)
        model.load_weights(path)
        save(model, path)
        return [float(abs(a - b).max()) for a, b in zip(model.get_weights(), expected, strict=True)]

    assert all(set(found) == {0.0} for found in run_ranks(load_and_save_again, ranks))
    assert os.listdir(tmp_path) == [name]


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("name", ["a.keras", "a.weights.h5"])
def test_errors_name_the_path_of_the_user(ranks, name, tmp_path):
    path = tmp_path / "missing" / name

    def fails(rank):
        distribute(ranks)
        with pytest.raises(FileNotFoundError) as error:
            save(build(), path)
        return str(error.value)

    for message in run_ranks(fails, ranks):
        assert f"'{path}'" in message
        assert "unfinished" not in message


class Kill(keras.callbacks.Callback):
    """Kills this rank in the last epoch."""

    def on_epoch_begin(self, epoch, logs=None):
        if epoch == EPOCHS - 1:
            os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_resumed_run_is_bit_for_bit_the_undisturbed_one(ranks, tmp_path):
    folder = tmp_path / "backup"

    def undisturbed(rank):
        distribute(ranks)
        model = build()
        fit(model)
        return model.get_weights()

    def killed(rank):
        distribute(ranks)
        last = [Kill()] if rank == ranks - 1 else []
        fit(build(), keras.callbacks.BackupAndRestore(folder), *last)

    def resumed(rank):
        distribute(ranks)
        model = build(seed=9)  # also other seeds: of dropout, and of the order of the samples
        history = fit(model, keras.callbacks.BackupAndRestore(folder))
        return model.get_weights(), history.epoch

    expected = run_ranks(undisturbed, ranks)[0]
    with pytest.raises(RankFailed):
        run_ranks(killed, ranks)
    # As after a crash before the second file of Keras is written.
    (folder / "training_metadata.json").write_text(json.dumps({"epoch": 1, "batch": 0}))
    for found, epochs in run_ranks(resumed, ranks):
        assert epochs == [EPOCHS - 1]
        for one, other in zip(found, expected, strict=True):
            np.testing.assert_array_equal(one, other)


def test_a_damaged_training_state_is_an_error_that_names_the_file(tmp_path):
    def resume(rank):
        import h5py

        distribute(1)
        fit(build(), keras.callbacks.BackupAndRestore(tmp_path, delete_checkpoint=False))
        with h5py.File(tmp_path / "latest.weights.h5", "r+") as file:
            file.attrs["shardcore"] = file.attrs["shardcore"][:-20]
        with pytest.raises(CheckpointError, match=r"latest.weights.h5' .* is damaged"):
            fit(build(), keras.callbacks.BackupAndRestore(tmp_path))

    run_ranks(resume, 1)


def test_a_full_disk_is_one_error_on_all_ranks_for_a_log():
    def log(rank):
        distribute(2)
        with pytest.raises(OSError, match="No space left") as error:
            fit(build(), keras.callbacks.CSVLogger("/dev/full"))
        return error.value.__notes__[0]

    assert set(run_ranks(log, 2)) == {
        "Rank 0 could not write the file of CSVLogger '/dev/full': every rank raises this error."
    }


def test_a_full_disk_is_one_error_on_all_ranks_for_the_epoch_of_a_backup(tmp_path, monkeypatch):
    (tmp_path / "training_metadata.json").mkdir()  # a file cannot be renamed to it

    def back_up(rank):
        distribute(2)
        backup = keras.callbacks.BackupAndRestore(tmp_path)
        backup._load_model = lambda: None
        with pytest.raises(IsADirectoryError, match=r"training_metadata\.json'"):
            fit(build(), backup)

    run_ranks(back_up, 2)
