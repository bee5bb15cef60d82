"""Built-in callbacks decide the same on all ranks, and one rank writes their files."""

import os

import keras
import numpy as np

import shardcore
from shardcore.testing import run_ranks
from tests.distributed.test_files import X, Y, build, distribute

CALLBACKS = keras.callbacks


def fit(model, epochs, *callbacks):
    data = {"validation_data": (X[:7], Y[:7]), "shuffle": False, "verbose": 0}
    return model.fit(X, Y, batch_size=8, epochs=epochs, callbacks=list(callbacks), **data)


def test_decisions_are_those_of_one_device_on_every_rank(tmp_path):
    def train(rank, shape):
        if shape:
            distribute(shape)
        model = build()
        history = fit(
            model,
            6,
            CALLBACKS.ReduceLROnPlateau(monitor="loss", factor=0.5, patience=1, min_delta=0.5),
            CALLBACKS.EarlyStopping(monitor="loss", patience=4, min_delta=0.5),
            CALLBACKS.LearningRateScheduler(lambda epoch, rate: rate * 0.9),
            CALLBACKS.TerminateOnNaN(),
        )
        return history.history, float(model.optimizer.learning_rate)

    (expected, rate), *_ = run_ranks(train, 1, None)
    assert len(expected["loss"]) < 6
    for shape in [(1, 2), (2, 1)]:
        for history, own_rate in run_ranks(train, 2, shape):
            assert own_rate == rate
            assert history.keys() == expected.keys()
            for name, values in expected.items():
                np.testing.assert_allclose(history[name], values, atol=1e-5)


def test_one_rank_writes_the_files(tmp_path):
    def train(rank):
        distribute((1, 2))
        model = build()
        fit(
            model,
            2,
            CALLBACKS.ModelCheckpoint(tmp_path / "best-{epoch}.keras", monitor="loss", verbose=1),
            CALLBACKS.CSVLogger(tmp_path / "log.csv"),
        )
        return model.get_weights()

    weights = run_ranks(train, 2)[0]
    assert sorted(os.listdir(tmp_path)) == ["best-1.keras", "best-2.keras", "log.csv"]
    lines = (tmp_path / "log.csv").read_text().splitlines()
    assert [line.split(",")[0] for line in lines] == ["epoch", "0", "1"]

    def read(rank):
        return keras.saving.load_model(tmp_path / "best-2.keras").get_weights()

    for saved, kept in zip(run_ranks(read, 1)[0], weights, strict=True):
        np.testing.assert_array_equal(saved, kept)


def test_training_goes_on_where_it_was_interrupted(tmp_path):
    class Interrupt(CALLBACKS.Callback):
        def on_epoch_begin(self, epoch, logs=None):
            if epoch == 2:
                raise InterruptedError

    def train(rank):
        distribute((2, 1))
        whole = fit(build(), 4).history["loss"]
        try:
            fit(build(), 4, CALLBACKS.BackupAndRestore(tmp_path / "backup"), Interrupt())
        except InterruptedError:
            kept = sorted(os.listdir(tmp_path / "backup"))
        again = fit(build(), 4, CALLBACKS.BackupAndRestore(tmp_path / "backup")).history["loss"]
        shardcore.uninstall()
        return whole, kept, again

    for whole, kept, again in run_ranks(train, 2):
        assert kept == ["latest.weights.h5", "training_metadata.json"]
        np.testing.assert_allclose(again, whole[2:], rtol=1e-5)
    assert os.listdir(tmp_path) == []
