"""Steps are recorded where that pays: short calls run eagerly, long ones are captured."""

import itertools
import logging
import os
from unittest import mock

import keras
import numpy as np
import pytest

from shardcore.binding.capture.cache import CacheEntry
from shardcore.domain.capture import LATER, NEEDED, Event, Payback
from shardcore.testing import run_ranks
from tests.distributed.capture.steps import (
    assert_equal,
    begin,
    compiled,
    messages,
    plain_mlp,
    state,
)

ROWS = 4
RECORDED, MATCHED, RAN, SKIPPED = Event.RECORDED, Event.MATCHED, Event.RAN, Event.SKIPPED


def data(steps, rest=0):
    rng = np.random.default_rng(1)
    rows = ROWS * steps + rest
    return rng.normal(size=(rows, 6)).astype("float32"), rng.integers(0, 4, rows)


def fit_short(model):
    return model.fit(*data(4), ROWS, epochs=NEEDED // 4 - 1, verbose=0)


def fit_long(model):
    return model.fit(*data(NEEDED), ROWS, epochs=2, verbose=0)


def fit_many_epochs(model):
    return model.fit(*data(4), ROWS, epochs=NEEDED // 2, verbose=0)


def fit_uneven(model):
    """The smaller batch comes once in an epoch."""
    return model.fit(*data(7, rest=2), ROWS, epochs=6, verbose=0)


def fit_and_validate(model):
    return model.fit(*data(8), ROWS, epochs=4, verbose=0, validation_data=data(2))


def loop(model):
    """Trains by a loop, of which the number of steps is unknown: those that ran count."""
    x, y = data(NEEDED + 4)
    return [model.train_on_batch(x[n : n + ROWS], y[n : n + ROWS]) for n in range(0, len(x), ROWS)]


def predict_once(model):
    return model.predict(data(3)[0], ROWS, verbose=0)


def predict_much(model):
    return model.predict(data(NEEDED + 3)[0], ROWS, verbose=0)


def trained(program, jit_compile):
    """The events of the steps, by the method and the rows, and all numbers."""
    model = compiled(plain_mlp, jit_compile)
    events, note = {}, CacheEntry.apply_event

    def noted(entry, event):
        events.setdefault(entry.signature.sizes[0][0][0], []).append(event)
        note(entry, event)

    # Without times: on a loaded machine a recorded step may take long.
    with (
        mock.patch.object(CacheEntry, "apply_event", noted),
        mock.patch.object(Payback, "is_worth", return_value=True),
    ):
        found = program(model)
    numbers = found.history if hasattr(found, "history") else found
    return events, [*map(np.asarray, keras.tree.flatten(numbers)), *state(model)]


def captured(steps):
    return [RECORDED, MATCHED, *[RAN] * (steps - 2)]


# The first step of a fit on a mesh creates the sums of its metrics, and does not count.
EXPECTED = {
    fit_short: lambda first: {},
    fit_long: lambda first: {ROWS: captured(2 * NEEDED - 2 - first)},
    fit_many_epochs: lambda first: {ROWS: captured(2 * NEEDED - 2 - first)},
    fit_uneven: lambda first: {ROWS: captured(42 - 2 - first), 2: [SKIPPED]},
    fit_and_validate: lambda first: {ROWS: captured(32 - 2 - first)},
    loop: lambda first: {ROWS: captured(4)},
    predict_once: lambda first: {},
    predict_much: lambda _: {ROWS: captured(NEEDED + 1)},
}


@pytest.mark.parametrize("shape", [None, (2, 1)])
def test_steps_are_recorded_where_it_pays(shape):
    def program(rank):
        os.environ["SHARDCORE_CAPTURE"] = ""
        begin(shape)
        return {use: (trained(use, "auto"), trained(use, False)) for use in EXPECTED}

    for found in run_ranks(program, 1 if shape is None else 2, timeout=180):
        for use, ((events, numbers), (never, eager)) in found.items():
            assert never == {}
            assert (use.__name__, events) == (use.__name__, EXPECTED[use](shape is not None))
            assert_equal(numbers, eager)


@pytest.mark.parametrize("pays", [True, False])
def test_a_change_on_one_rank_while_few_steps_are_left_holds_up_no_rank(pays):
    """It begins again where the others record their second step, with too few steps left to pay.

    Its second recording may take too long: the others have a trace, so it is not postponed.
    """

    def program(rank):
        os.environ["SHARDCORE_CAPTURE"] = ""
        begin((2, 1))
        model = compiled(plain_mlp, "auto")
        layer = model.layers[1]

        def change(batch, logs):
            if rank == 1 and batch == 2:  # which was the first recorded one
                layer.factors[0] = 1.0 if layer.factors[0] != 1.0 else 1.0 + 1e-9

        callback = keras.callbacks.LambdaCallback(on_train_batch_end=change)
        paying = itertools.chain([True], itertools.repeat(pays))
        with mock.patch.object(Payback, "is_worth", side_effect=paying):
            history = model.fit(*data(NEEDED + 2), ROWS, verbose=0, callbacks=[callback])
        return history.history["loss"]

    first, second = run_ranks(program, 2, timeout=120)
    assert first == second


def test_where_recording_takes_long_steps_stay_eager():
    """Each rank measures for itself: one that finds it too long is enough."""

    def program(rank):
        os.environ["SHARDCORE_CAPTURE"] = ""
        begin((2, 1))
        said = messages(logging.DEBUG)
        model = compiled(plain_mlp, "auto")
        events, note = [], CacheEntry.apply_event

        def noted(entry, event):
            events.append(event)
            note(entry, event)

        with (
            mock.patch.object(CacheEntry, "apply_event", noted),
            mock.patch.object(Payback, "is_worth", return_value=rank == 0),
        ):
            model.fit(*data(NEEDED + 5), ROWS, epochs=2, verbose=0)
        return events, [int(word) for line in said for word in line.split() if word.isdigit()]

    expected = [Event.POSTPONED], [NEEDED, LATER * NEEDED]
    assert run_ranks(program, 2, timeout=120) == [expected] * 2
