"""BackupAndRestore that saves at steps: a fit goes on where it was stopped, however often."""

import json
from unittest import mock

import h5py
import keras
import numpy as np
import pytest

import shardcore
from shardcore.adapters.ranks.processes import TorchProcesses
from shardcore.domain.errors import CheckpointError
from shardcore.testing import RankFailed, run_ranks
from tests.distributed.files.test_files_after_a_crash import X, build, distribute

EPOCHS, STEPS = 4, 6  # of four rows


class Stop(keras.callbacks.Callback):
    """Ends the fit before a step, as a crash would; counts the steps that begin."""

    def __init__(self, stop=None):
        super().__init__()
        self.stop = stop
        self.begun = []

    def on_epoch_begin(self, epoch, logs=None):
        self.epoch = epoch

    def on_train_batch_begin(self, batch, logs=None):
        if (self.epoch, batch) == self.stop:
            raise KeyboardInterrupt
        self.begun.append((self.epoch, batch))


def generator():
    while True:
        for start in range(0, 24, 4):
            yield X[start : start + 4], X[start : start + 4, :1]


def fit(model, *callbacks, source="arrays", initial_epoch=0):
    data = {
        "arrays": {"x": X, "y": X[:, :1], "batch_size": 4},
        "generator": {"x": generator(), "steps_per_epoch": STEPS, "shuffle": False},
    }[source]
    options = {"epochs": EPOCHS, "initial_epoch": initial_epoch, "verbose": 0}
    return model.fit(**data, **options, callbacks=list(callbacks))


def all_steps(first=(0, 0)):
    return [(e, b) for e in range(EPOCHS) for b in range(STEPS) if (e, b) >= first]


@pytest.mark.parametrize(
    ("ranks", "source", "freq"), [(1, "arrays", 1), (1, "generator", 2), (2, "arrays", 5)]
)
def test_a_fit_that_is_stopped_again_and_again_is_that_of_no_stop(ranks, source, freq, tmp_path):
    stops = [(2, 3), (2, 5), (3, 1), None]

    def undisturbed(rank):
        distribute(ranks)
        model = build()
        history = fit(model, source=source).history["loss"]
        return model.get_weights(), history

    def stopped(rank, stop, seed):
        distribute(ranks)
        model, steps = build(seed), Stop(stop)
        backup = keras.callbacks.BackupAndRestore(tmp_path / "backup", save_freq=freq)
        history = None
        try:
            history = fit(model, steps, backup, source=source)
        except KeyboardInterrupt:
            assert stop is not None
        return model.get_weights(), history and history.history["loss"], steps.begun

    expected, losses = run_ranks(undisturbed, ranks)[0]
    done = 0
    for number, stop in enumerate(stops):
        runs = run_ranks(stopped, ranks, stop, number + 1)
        for _, _, begun in runs:
            # It begins after the last save, at most `freq` steps before the stop.
            end = all_steps().index(stop) if stop else EPOCHS * STEPS
            assert begun == all_steps()[done // freq * freq : end]
        done = end
    found, history, _ = runs[0]
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_array_equal(one, other)
    np.testing.assert_allclose(history, losses[-len(history) :], rtol=1e-5)


def test_a_fit_that_begins_at_a_later_epoch_is_resumed_there(tmp_path):
    def stopped(rank, stop):
        distribute(1)
        steps = Stop(stop)
        backup = keras.callbacks.BackupAndRestore(tmp_path / "backup", save_freq=2)
        try:
            fit(build(), steps, backup, initial_epoch=2)
        except KeyboardInterrupt:
            assert stop
        return steps.begun

    assert run_ranks(stopped, 1, (2, 3)) == [[(2, 0), (2, 1), (2, 2)]]
    assert run_ranks(stopped, 1, None) == [all_steps((2, 2))]


def test_keras_alone_reads_the_backup_of_a_step_with_large_metrics(tmp_path):
    class Large(keras.metrics.Metric):
        def __init__(self):
            super().__init__(name="large")
            self.values = self.add_weight(shape=(300, 100), initializer="zeros")

        def update_state(self, y, y_pred, sample_weight=None):
            self.values.assign_add(keras.ops.ones((300, 100)))

        def result(self):
            return keras.ops.sum(self.values)

    def stopped(rank, stop):
        distribute(2)
        model = build()
        model.compile("sgd", "mse", metrics=[Large()])
        backup = keras.callbacks.BackupAndRestore(tmp_path / "backup", save_freq=1)
        history = None
        try:
            history = fit(model, Stop(stop), backup)
        except KeyboardInterrupt:
            assert stop
        return history and history.history["large"]

    run_ranks(stopped, 2, (3, 3))
    build().load_weights(tmp_path / "backup" / "latest.weights.h5")
    assert run_ranks(stopped, 2, None) == [[300 * 100 * STEPS]] * 2


def path_of(folder, rank):
    return folder / f"host-{rank}"


def test_each_rank_may_have_a_path_of_its_own_for_all_callbacks(tmp_path):
    def train(rank, stop):
        distribute(2)
        own, model = path_of(tmp_path, rank), build()
        own.mkdir(exist_ok=True)
        callbacks = [
            keras.callbacks.BackupAndRestore(own / "backup", save_freq=2),
            keras.callbacks.ModelCheckpoint(str(own / "models" / "{epoch}.keras")),
            keras.callbacks.CSVLogger(own / "log.csv", append=True),
        ]
        steps = Stop(stop)
        history = None
        try:
            history = fit(model, *callbacks, steps)
        except KeyboardInterrupt:
            assert stop
        return history and history.epoch, steps.begun[0]

    assert run_ranks(train, 2, (2, 3)) == [(None, (0, 0))] * 2
    assert run_ranks(train, 2, None) == [([2, 3], (2, 2))] * 2
    # The backups are deleted: the next fit begins at the beginning, on all ranks.
    assert run_ranks(train, 2, None) == [([0, 1, 2, 3], (0, 0))] * 2
    for rank in range(2):
        own = path_of(tmp_path, rank)
        assert sorted(each.name for each in own.iterdir()) == ["log.csv", "models"]
        assert len(list((own / "models").iterdir())) == EPOCHS
        lines = (own / "log.csv").read_text().splitlines()
        assert [line.split(",")[0] for line in lines] == ["epoch", *"01230123"]
        keras.models.load_model(own / "models" / "4.keras")


def test_a_callback_of_all_ranks_waits_for_no_rank_that_saves_elsewhere(tmp_path):
    """Nothing is sharded, so one rank alone might save: it would wait a second for rank 0."""

    def train(rank):
        shardcore.install("dtensor")
        keras.distribution.set_distribution(keras.distribution.DataParallel())
        own = path_of(tmp_path, rank)
        callbacks = [
            keras.callbacks.ModelCheckpoint(own / "all.keras"),
            keras.callbacks.ModelCheckpoint(own / "best.weights.h5", "loss", 0, True, True),
            keras.callbacks.BackupAndRestore(own / "backup", delete_checkpoint=False),
        ]
        with mock.patch.object(TorchProcesses, "do_once", side_effect=AssertionError) as waits:
            fit(build(), *callbacks)
        return waits.call_count, sorted(path.name for path in own.iterdir())

    expected = 0, ["all.keras", "backup", "best.weights.h5"]
    assert run_ranks(train, 2) == [expected] * 2


def test_ranks_that_found_different_backups_are_an_error_that_names_them(tmp_path):
    def save(rank):
        distribute(2)
        folder = path_of(tmp_path, rank)
        backup = keras.callbacks.BackupAndRestore(folder, save_freq=2, delete_checkpoint=False)
        with pytest.raises(KeyboardInterrupt):
            fit(build(), backup, Stop((1, 3)))

    def resume(rank):
        distribute(2)
        folder = path_of(tmp_path, rank)
        fit(build(), keras.callbacks.BackupAndRestore(folder, delete_checkpoint=False))

    run_ranks(save, 2)
    file = path_of(tmp_path, 1) / "latest.weights.h5"
    with h5py.File(file, "r+") as content:
        state = json.loads(content.attrs["shardcore"]) | {"epoch": 0}
        content.attrs["shardcore"] = json.dumps(state)
    with pytest.raises(RankFailed, match=r"rank 0: epoch 1, 2 steps of it in .*rank 1: epoch 0"):
        run_ranks(resume, 2)
    file.unlink()
    with pytest.raises(
        RankFailed, match=r"rank 1: nothing in .*Copy the one to go on with"
    ) as error:
        run_ranks(resume, 2)
    assert CheckpointError.__name__ in str(error.value)


def test_a_damaged_backup_gives_way_to_the_one_before_on_all_ranks(tmp_path):
    def save(rank, folders):
        distribute(2)
        backup = keras.callbacks.BackupAndRestore(
            folders[rank], double_checkpoint=True, delete_checkpoint=False
        )
        with pytest.raises(KeyboardInterrupt):
            fit(build(), backup, Stop((2, 3)))

    def resume(rank, folders):
        distribute(2)
        steps = Stop()
        fit(build(), steps, keras.callbacks.BackupAndRestore(folders[rank]))
        return steps.begun[0]

    for folders in ([tmp_path / "one"] * 2, [path_of(tmp_path, rank) for rank in range(2)]):
        run_ranks(save, 2, folders)
        for folder in folders:
            (folder / "latest.weights.h5").write_bytes(b"no file of HDF5")
        assert run_ranks(resume, 2, folders) == [(1, 0)] * 2
        assert not any(folder.exists() for folder in folders)


def test_an_export_has_a_path_for_each_rank(tmp_path):
    def export(rank):
        distribute(2)
        model = build()
        path = path_of(tmp_path, rank).with_suffix(".pt2")
        model.export(path, format="torch", verbose=False)
        assert shardcore.verify(model).ok
        return path.exists()

    assert run_ranks(export, 2) == [True] * 2
