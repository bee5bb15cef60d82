"""Whatever code of the user runs between two steps of `fit`: the next step sees what it changed."""

import contextlib
import warnings

import keras
import numpy as np
import pytest

import shardcore
from shardcore.testing import run_ranks
from tests.distributed.capture.states.changers import (
    APART,
    BATCH,
    CHANGERS,
    EPOCHS,
    at_once,
    data,
    stream_within_an_epoch,
)
from tests.distributed.capture.steps import messages
from tests.distributed.programs import distribute

ON_RANKS = ("lambda_callback", "generator", "metric_that_is_reset", "callback_of_a_validation")


class Scaled(keras.layers.Layer):
    rate = 1.0

    def call(self, inputs):
        return inputs * self.rate


def trained(changer, run_eagerly):
    """Returns the losses of epochs in which the rate of a layer becomes 2.0; nothing is learned."""
    keras.utils.set_random_seed(0)
    inputs = keras.Input((3,))
    layer, (x, y) = Scaled(), data()
    given = changer(lambda: setattr(layer, "rate", 2.0))
    model_class = type("Model", (keras.Model,), given.pop("class_methods", {}))
    model = model_class(inputs, keras.layers.Dense(1)(layer(inputs)))
    model.compile(keras.optimizers.SGD(0.0), "mse", metrics=given.pop("metrics", None))
    model.run_eagerly = run_eagerly
    for name, method in given.pop("methods", {}).items():
        setattr(model, name, method)
    scope = given.pop("scope", contextlib.nullcontext)
    options = {"x": x, "y": y, "batch_size": BATCH, "epochs": EPOCHS, "shuffle": False}
    with scope():
        return model.fit(**{**options, "verbose": 0, **given}).history["loss"]


def losses(_rank, changers):
    """Returns the losses of eager and of captured steps, and what was said about capture."""
    warnings.simplefilter("ignore")
    said = messages()
    found = {
        changer.__name__: (trained(changer, True), trained(changer, False)) for changer in changers
    }
    return found, list(said)


def check(found):
    for name, (eager, captured) in found.items():
        assert eager[0] != eager[-1], f"{name}: the change made no difference"
        np.testing.assert_allclose(captured, eager, rtol=1e-5, err_msg=name)


def test_a_step_sees_what_code_of_the_user_changed_before_it():
    def program(rank):
        shardcore.install("single")
        return losses(rank, CHANGERS)

    ((found, said),) = run_ranks(program, 1, timeout=180)
    check(found)
    assert ["attribute 'count' of" in text for text in said] == [True]  # of the own test step


def test_a_step_sees_what_code_of_the_user_changed_on_two_ranks():
    def program(rank):
        distribute((2, 1))
        return losses(rank, [each for each in CHANGERS if each.__name__ in ON_RANKS])

    for found, said in run_ranks(program, 2, timeout=180):
        check(found)
        assert said == []


def test_a_step_sees_what_a_thread_or_a_signal_handler_changed():
    def program(rank):
        shardcore.install("single")
        warnings.simplefilter("ignore")
        found = {changer.__name__: trained(changer, False)[-1] for changer in APART}
        return trained(at_once, True)[0], found

    ((expected, found),) = run_ranks(program, 1, timeout=180)
    for name, last in found.items():
        assert abs(last - expected) < 1e-5, f"{name}: the change was not seen"


def test_a_step_sees_what_a_stream_changed_within_the_epoch():
    """Keras writes its progress beside the next step, so that the change may come a step later."""

    def program(rank):
        shardcore.install("single")
        return losses(rank, [stream_within_an_epoch])

    ((found, _),) = run_ranks(program, 1)
    ((eager, captured),) = found.values()
    assert eager[1] > eager[0] + 0.2
    assert captured == pytest.approx(eager, abs=0.2)
