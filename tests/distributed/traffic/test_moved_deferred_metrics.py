"""Steps whose results are unused reduce no loss and no metric; each reader gets all of them."""

import keras
import numpy as np
import pytest

from shardcore.testing import count_collectives, run_ranks
from tests.distributed.capture.steps import Spy, calls
from tests.distributed.models import mlp
from tests.distributed.traffic.moved import DATA, assert_same, compiled, distribute

STEPS, EPOCHS = 4, 2
X, Y = (np.tile(each, (STEPS, 1)) for each in DATA[mlp])
X = X * np.linspace(0.5, 2, len(X))[:, None].astype("float32")
CALLBACKS = keras.callbacks


class Looks(CALLBACKS.Callback):
    """Reads the logs of each step."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def on_train_batch_end(self, batch, logs=None):
        self.seen.append(logs["loss"])


class Waits(CALLBACKS.Callback):
    """Reads the logs of epochs only, and the metrics."""

    def on_epoch_end(self, epoch, logs=None):
        assert logs["val_loss"] == pytest.approx(float(self.model.metrics[0].result()))


class Own(keras.Sequential):
    """Its steps return additional logs."""

    def compute_metrics(self, x, y, y_pred, sample_weight=None):
        return super().compute_metrics(x, y, y_pred, sample_weight) | {"own": 2.0}


def fitted(model, found, name, *callbacks, **options):
    """The numbers of a fit with validation; the all-reduces, one in each step for gradients."""
    options = {"batch_size": 8, "verbose": 0, "shuffle": False} | options
    with count_collectives() as traffic:
        history = model.fit(
            X, Y, validation_data=(X, Y), epochs=EPOCHS, callbacks=callbacks, **options
        )
    found |= {f"{name} {key}": np.array(value) for key, value in history.history.items()}
    return traffic.calls["all_reduce"] - STEPS * EPOCHS


def spied():
    dense = [keras.layers.Dense(units, activation="relu") for units in (12, 7)]
    return keras.Sequential([keras.Input((16,)), Spy(), *dense])


def deferred(rank, strategy=None):
    if strategy:
        distribute(mlp, (2, 1), strategy=strategy)
    found, counts = {}, {}
    for jit_compile in (False, "auto"):
        model = compiled(spied, metrics=["mae"], jit_compile=jit_compile)
        if jit_compile:  # both kinds of steps are recorded
            fitted(model, found, f"first {jit_compile}", Waits())
            fitted(model, found, f"read {jit_compile}", Looks())
        calls.clear()
        counts["fit", jit_compile] = fitted(model, found, f"again {jit_compile}", Waits())
        with count_collectives() as traffic:
            logs = model.evaluate(X, Y, batch_size=8, verbose=0, return_dict=True)
        counts["evaluate", jit_compile] = traffic.calls["all_reduce"]
        found |= {f"evaluate {jit_compile} {key}": np.array(v) for key, v in logs.items()}
        fitted(model, found, f"read again {jit_compile}", Looks())
    counts["eager steps"] = len(calls)
    return found, counts


@pytest.fixture(scope="module")
def one_device():
    ((expected, _),) = run_ranks(deferred, 1)
    return expected


@pytest.mark.parametrize("strategy", ["dtensor", "manual"])
def test_an_epoch_reduces_its_loss_and_metrics_once(strategy, one_device):
    for found, counts in run_ranks(deferred, 2, strategy, timeout=120):
        assert_same(found, one_device, strategy)
        for jit_compile in (False, "auto"):
            assert counts["fit", jit_compile] == 2 * EPOCHS  # of training, and of validation
            assert counts["evaluate", jit_compile] == 1
        assert counts["eager steps"] == 0  # both kinds are captured, one beside the other


def on_one_rank(rank, distributed=False):
    """One rank reads results: all ranks reduce them at each step, without reading them."""
    if distributed:
        distribute(mlp, (2, 1))
    looks, found, model = Looks(), {}, compiled(mlp, jit_compile=False)
    counts = [fitted(model, found, "looks", *([looks] if rank == 0 else []))]
    counts.append(fitted(model, found, "bar", verbose=1 if rank == 0 else 0))
    counts.append(fitted(model, found, "line", verbose=2 if rank == 0 else 0))
    own = Own(model.layers)
    own.compile("sgd", "mse", jit_compile=False)
    counts.append(fitted(own, found, "own"))
    if rank == 0:  # what a fit leaves behind is whole: one rank may read it
        found["after"] = np.array(float(own.metrics[0].result()))
        found["seen"] = np.array(looks.seen)
    return found, counts


def test_results_that_one_rank_reads_are_reduced_on_all():
    ((expected, _),) = run_ranks(on_one_rank, 1)
    (found, counts), (other, other_counts) = run_ranks(on_one_rank, 2, True, timeout=60)
    assert_same(found, expected, "the rank that looks")
    assert_same(other, {name: found[name] for name in other}, "the other")
    every_step, every_evaluation = EPOCHS * STEPS, EPOCHS
    read = every_step + every_evaluation
    # `Own` reads its validation, too. The logs of its steps stand for those of the epoch.
    assert counts == other_counts == [read, read, 2 * EPOCHS, 2 * every_step]


def in_the_middle(rank, distributed=False):
    """The data of a step look at what came before, and fail."""
    if distributed:
        distribute(mlp, (2, 1))
    model, seen = compiled(mlp, metrics=["mae"], jit_compile=False), []

    class Batches(keras.utils.PyDataset):
        fails = False

        def __len__(self):
            return STEPS

        def __getitem__(self, step):
            if step == 1:
                seen.append(float(model.metrics[0].result()))  # pending, and still so
            if step == 2:
                seen.extend(map(float, model.get_metrics_result().values()))
            if step == 3 and self.fails:
                raise InterruptedError
            return X[8 * step :][:8], Y[8 * step :][:8]

    batches = Batches()
    history = model.fit(batches, verbose=0, shuffle=False)
    batches.fails = True
    with pytest.raises(InterruptedError):
        model.fit(batches, verbose=0, shuffle=False)
    alone = float(model.metrics[0].result()) if rank == 0 else 0.0
    batches.fails = False
    again = model.fit(batches, verbose=0, shuffle=False)
    every = [*history.history.values(), *again.history.values()]
    return {"seen": np.array(seen), "history": np.array(every)}, alone


def test_results_are_read_in_the_middle_of_an_epoch():
    ((expected, _),) = run_ranks(in_the_middle, 1)
    (found, alone), (other, _) = run_ranks(in_the_middle, 2, True, timeout=60)
    assert_same(found, expected, "read in the middle")
    assert_same(other, expected, "read in the middle")
    assert np.isnan(alone)  # one rank cannot know it, nor wait for the others
