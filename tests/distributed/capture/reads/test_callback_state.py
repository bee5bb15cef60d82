"""State in callbacks, and in the history of a model, that a step reads."""

import keras
import numpy as np
import pytest

import shardcore
from shardcore.testing import run_ranks
from tests.distributed.capture.steps import messages
from tests.distributed.programs import distribute

X = np.linspace(0.1, 1, 24).reshape(8, 3).astype("float32")
Y = np.ones((8, 2), "float32")


class Anneal(keras.callbacks.Callback):
    """Raises a rate with each epoch, as for the weight of a divergence."""

    def __init__(self):
        super().__init__()
        self.rate, self.rates, self.batches = 0.0, {"rate": 0.0}, 0

    def on_epoch_begin(self, epoch, logs=None):
        self.rate = self.rates["rate"] = epoch / 3

    def on_train_batch_end(self, batch, logs=None):
        self.batches += 1  # no step reads it

    def doubled(self):
        return 2 * self.rate


class Scaled(keras.layers.Layer):
    """Multiplies its input by what it reads."""

    def __init__(self, read):
        super().__init__()
        self.read = read

    def call(self, x):
        return x * (1 + self.read())


class Remembers(keras.Sequential):
    """A model whose loss grows with the epochs of its history."""

    def compute_loss(self, *args, **kwargs):
        past = self.history.history.get("loss", []) if hasattr(self, "history") else []
        return super().compute_loss(*args, **kwargs) * (1.0 + len(past))


def read_by_a_loss(anneal, stopping):
    model = keras.Sequential([keras.layers.Dense(2)])
    model.compile("sgd", lambda y, p: (1 + anneal.rate) * keras.ops.mean((y - p) ** 2))
    return model


def read_by(read):
    def build(anneal, stopping):
        model = keras.Sequential([Scaled(lambda: read(anneal)), keras.layers.Dense(2)])
        model.compile("sgd", "mse")
        return model

    return build


def read_of_early_stopping(anneal, stopping):
    model = keras.Sequential([Scaled(lambda: float(stopping.wait)), keras.layers.Dense(2)])
    model.compile("sgd", "mse")
    return model


def read_of_the_history(anneal, stopping):
    model = Remembers([keras.layers.Dense(2)])
    model.compile("sgd", "mse")
    return model


READS = {
    "loss": read_by_a_loss,
    "attribute": read_by(lambda anneal: anneal.rate),
    "dict": read_by(lambda anneal: anneal.rates["rate"]),
    "method": read_by(lambda anneal: anneal.doubled()),
    "early stopping": read_of_early_stopping,
    "history": read_of_the_history,
}


def trained(build, run_eagerly):
    """Returns the losses of five epochs."""
    keras.utils.set_random_seed(0)
    anneal = Anneal()
    stopping = keras.callbacks.EarlyStopping("loss", patience=9, mode="max")
    model = build(anneal, stopping)
    model.run_eagerly = run_eagerly
    callbacks = [anneal, stopping]
    fit = model.fit(X, Y, batch_size=4, epochs=5, shuffle=False, verbose=0, callbacks=callbacks)
    return fit.history["loss"]


@pytest.mark.parametrize(("ranks", "names"), [(1, tuple(READS)), (2, ("loss", "history"))])
def test_a_step_sees_what_a_callback_has_changed(ranks, names, monkeypatch):
    monkeypatch.setenv("SHARDCORE_CAPTURE", "at-once")

    def program(rank):
        shardcore.install("single") if ranks == 1 else distribute((2, 1))
        said = messages()
        losses = {
            name: [trained(READS[name], run_eagerly) for run_eagerly in (True, False)]
            for name in names
        }
        return losses, list(said)

    for losses, said in run_ranks(program, ranks, timeout=120):
        for name, (eager, captured) in losses.items():
            np.testing.assert_allclose(captured, eager, rtol=1e-5, err_msg=name)
        assert said == []
