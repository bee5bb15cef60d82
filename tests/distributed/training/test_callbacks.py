"""Built-in callbacks decide the same on all ranks, and one rank writes their files."""

import inspect
import os
import tempfile
from importlib.util import find_spec
from types import SimpleNamespace

import h5py
import keras
import numpy as np
import pytest

import shardcore
from shardcore.domain.errors import CallProblem
from shardcore.testing import run_ranks
from tests.distributed.files.test_files import X, Y, build, distribute
from tests.loggers import page

CALLBACKS = keras.callbacks
REMOTE = inspect.getmodule(CALLBACKS.RemoteMonitor)


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


def test_training_stops_at_the_same_nan_on_every_rank():
    """Only the second rank's rows of the second batch hold one."""
    x = X.copy()
    x[15] = np.nan

    def train(rank, shape):
        if shape:
            distribute(shape)
        model = build()
        data = {"batch_size": 8, "epochs": 3, "shuffle": False, "verbose": 0}
        history = model.fit(x, Y, callbacks=[CALLBACKS.TerminateOnNaN()], **data).history["loss"]
        return len(history), int(model.optimizer.iterations)

    assert run_ranks(train, 2, (2, 1)) == run_ranks(train, 1, None) * 2 == [(1, 2)] * 2


def test_one_rank_writes_the_files(tmp_path, monkeypatch):
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(scratch))

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
    assert os.listdir(scratch) == []
    scratch.rmdir()
    assert sorted(os.listdir(tmp_path)) == ["best-1.keras", "best-2.keras", "log.csv"]
    lines = (tmp_path / "log.csv").read_text().splitlines()
    assert [line.split(",")[0] for line in lines] == ["epoch", "0", "1"]

    def read(rank):
        return keras.saving.load_model(tmp_path / "best-2.keras").get_weights()

    monkeypatch.undo()
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


class Sent(SimpleNamespace):
    """A stand-in for the package `requests`."""

    exceptions = SimpleNamespace(RequestException=OSError)

    def post(self, address, json, headers):
        self.received.append((address, json["epoch"], sorted(json)))


def lambdas(found):
    def note(epoch, logs):
        found["epochs"].append((epoch, sorted(logs)))

    return CALLBACKS.LambdaCallback(on_epoch_end=note)


def train_with_the_rest(rank, shape, folder):
    """The callbacks that no other test here has, on one fit."""
    REMOTE.requests = Sent(received=[])  # it may not be installed
    if shape:
        distribute(shape)
    model = build()
    model.compile(keras.optimizers.Adam(0.01, use_ema=True, ema_momentum=0.9), model.loss)
    found = {"epochs": []}
    history = fit(
        model,
        2,
        lambdas(found),
        CALLBACKS.RemoteMonitor(send_as_json=True),
        CALLBACKS.SwapEMAWeights(swap_on_epoch=True),
        CALLBACKS.ModelCheckpoint(folder / "{epoch}.weights.h5", save_weights_only=True),
    )
    numbers = {**history.history, "weights": model.get_weights()}
    return numbers, found["epochs"], REMOTE.requests.received


def saved(folder, epoch):
    """Every array in a file of weights, the optimizer's too."""
    found = {}
    with h5py.File(folder / f"{epoch}.weights.h5") as file:
        file.visititems(
            lambda name, each: (
                found.update({name: each[()]}) if isinstance(each, h5py.Dataset) else None
            )
        )
    return found


def test_averaged_weights_are_swapped_into_the_file_and_one_rank_sends(tmp_path):
    folders = {shape: tmp_path / str(shape) for shape in (None, (1, 2))}
    ((numbers, epochs, sent),) = run_ranks(train_with_the_rest, 1, None, folders[None])
    results = run_ranks(train_with_the_rest, 2, (1, 2), folders[(1, 2)])
    for rank, (own, own_epochs, own_sent) in enumerate(results):
        assert own_epochs == epochs
        assert own_sent == (sent if rank == 0 else [])
        flat = zip(keras.tree.flatten(own), keras.tree.flatten(numbers), strict=True)
        for value, expected in flat:
            np.testing.assert_allclose(value, expected, atol=1e-5)
    for epoch in (1, 2):
        written, expected = (saved(folders[shape], epoch) for shape in ((1, 2), None))
        assert written.keys() == expected.keys()
        for name, value in written.items():
            np.testing.assert_allclose(value, expected[name], atol=1e-5, err_msg=name)


def test_rank_0_shows_progress(capfd):
    def train(rank):
        distribute((1, 2))
        model, lines = build(), []
        model.summary()
        model.summary(print_fn=lines.append)
        model.fit(X, Y, batch_size=8, epochs=2, verbose=2)
        return "".join(lines)

    for summary in run_ranks(train, 2):
        assert "Total params" in summary  # a function of the user gets it on every rank
    printed = capfd.readouterr().out
    assert printed.count("Total params") == 1
    assert printed.count("Epoch 1/2") == 1


def test_a_model_that_has_outlived_its_scope_writes_and_prints_from_one_rank(tmp_path, capfd):
    def train(rank):
        distribute((1, 2))
        model = build()
        keras.distribution.set_distribution(None)
        model.train_on_batch(X[:8], Y[:8])
        logged = CALLBACKS.CSVLogger(tmp_path / "log.csv")
        model.fit(X, Y, batch_size=8, epochs=2, verbose=2, callbacks=[logged])
        model.save_weights(tmp_path / "last.weights.h5")
        model.save(tmp_path / "last.keras")
        return model.get_weights()

    weights = run_ranks(train, 2)[0]
    assert capfd.readouterr().out.count("Epoch 1/2") == 1
    lines = (tmp_path / "log.csv").read_text().splitlines()
    assert [line.split(",")[0] for line in lines] == ["epoch", "0", "1"]

    def read(rank):
        model = keras.saving.load_model(tmp_path / "last.keras")
        saved = model.get_weights()
        model.load_weights(tmp_path / "last.weights.h5")
        return saved, model.get_weights()

    for saved in run_ranks(read, 1)[0]:
        for value, kept in zip(saved, weights, strict=True):
            np.testing.assert_array_equal(value, kept)


def test_orbax_is_refused():
    def refuse(rank):
        distribute((1, 2))
        callback = object.__new__(CALLBACKS.OrbaxCheckpoint)  # made, it asks for Orbax
        with pytest.raises(CallProblem, match="or ModelCheckpoint"):
            callback.set_model(build())

    run_ranks(refuse, 2)


@pytest.mark.parametrize("name", ["TensorBoard", "OrbaxCheckpoint"])
def test_a_callback_whose_package_is_missing_fails_alike_on_all_ranks(name, tmp_path):
    package = {"TensorBoard": "tensorflow", "OrbaxCheckpoint": "orbax"}[name]
    if find_spec(package):
        pytest.skip(f"{package} is installed")

    def train(rank):
        distribute((1, 2))
        with pytest.raises(ImportError, match=package):
            fit(build(), 1, getattr(CALLBACKS, name)(str(tmp_path)))

    run_ranks(train, 2)


TESTED = {
    "BackupAndRestore": test_training_goes_on_where_it_was_interrupted,
    "CSVLogger": test_one_rank_writes_the_files,
    "EarlyStopping": test_decisions_are_those_of_one_device_on_every_rank,
    "History": test_decisions_are_those_of_one_device_on_every_rank,
    "LambdaCallback": test_averaged_weights_are_swapped_into_the_file_and_one_rank_sends,
    "LearningRateScheduler": test_decisions_are_those_of_one_device_on_every_rank,
    "ModelCheckpoint": test_one_rank_writes_the_files,
    "OrbaxCheckpoint": test_orbax_is_refused,
    "ProgbarLogger": test_rank_0_shows_progress,
    "ReduceLROnPlateau": test_decisions_are_those_of_one_device_on_every_rank,
    "RemoteMonitor": test_averaged_weights_are_swapped_into_the_file_and_one_rank_sends,
    "SwapEMAWeights": test_averaged_weights_are_swapped_into_the_file_and_one_rank_sends,
    "TensorBoard": test_a_callback_whose_package_is_missing_fails_alike_on_all_ranks,
    "TerminateOnNaN": test_training_stops_at_the_same_nan_on_every_rank,
}
NO_CALLBACK = {"Callback": "the base class", "CallbackList": "what calls them"}


def test_every_public_callback_has_a_test():
    public = {name for name, value in vars(CALLBACKS).items() if inspect.isclass(value)}
    assert public == TESTED.keys() | NO_CALLBACK.keys()
    on_page = {row["of"][1] for row in page.kept()}
    assert TESTED.keys() - on_page == set(), "make loggers writes docs/reference/callbacks.md"
