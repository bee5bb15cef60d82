"""Settings of the process and attributes of batches that change between steps."""

import numbers
import os
import threading
import time
import warnings
from collections.abc import Sized
from threading import current_thread as thread
from warnings import warn as tell

import keras
import numpy as np
import pytest
import torch

import shardcore
from shardcore.testing import run_ranks
from tests.distributed.capture.steps import messages
from tests.distributed.programs import distribute

LARGE = np.float32(1e30)


def raises(error, work):
    """Tells whether `work` raises `error`, or one under it."""
    try:
        work()
    except error:
        return True
    return False


def seconds_of_a_day():
    return time.mktime((2026, 1, 1, 0, 0, 0, 0, 0, 0)) % 86400


def set_zone(hours):
    os.environ["TZ"] = f"ABC-{hours}"
    time.tzset()


# By name: what the layer reads, and what sets it before the first and before the fifth step.
SETTINGS = {
    "numpy": (
        lambda: raises(ArithmeticError, lambda: LARGE * LARGE),
        lambda on: np.seterr(over="raise" if on else "ignore"),
    ),
    "warnings": (
        lambda: raises(RuntimeWarning, lambda: np.log(np.float32(0))),
        lambda on: warnings.simplefilter("error" if on else "ignore", RuntimeWarning),
    ),
    "warn by another name": (
        lambda: raises(UserWarning, lambda: tell("text", UserWarning, 2)),
        lambda on: warnings.simplefilter("error" if on else "ignore", UserWarning),
    ),
    "thread by another name": (
        lambda: thread().name == "renamed",
        lambda on: setattr(threading.current_thread(), "name", "renamed" if on else "MainThread"),
    ),
    "time zone": (lambda: seconds_of_a_day() > 80000, lambda on: set_zone(1 if on else 2)),
}


class Reads(keras.layers.Layer):
    """Doubles its input if what it reads is true."""

    def __init__(self, read):
        super().__init__()
        self.read = read

    def call(self, x):
        return x * 2 if self.read() else x


def predictions(model, batches):
    return [float(np.mean(model.predict_on_batch(batch))) for batch in batches]


def compared(work):
    """Returns what `work` gives eagerly, and captured."""
    shardcore.install("single")
    return [work(jit) for jit in (False, "auto")]


@pytest.mark.parametrize("name", SETTINGS)
def test_a_setting_of_the_process_is_seen(name, monkeypatch):
    monkeypatch.setenv("SHARDCORE_CAPTURE", "at-once")
    read, change = SETTINGS[name]

    def work(jit):
        model = keras.Sequential([Reads(read)])
        model.compile(jit_compile=jit)
        change(False)
        batch = np.ones((4, 3), "float32")
        before = predictions(model, [batch] * 4)
        change(True)
        return before + predictions(model, [batch] * 4)

    ((eager, captured),) = run_ranks(lambda rank: compared(work), 1)
    assert captured == eager == [1.0] * 4 + [2.0] * 4


def test_an_attribute_of_a_batch_is_seen(monkeypatch):
    monkeypatch.setenv("SHARDCORE_CAPTURE", "at-once")

    class Scales(keras.layers.Layer):
        def call(self, x):
            return x * getattr(x, "scale", 1.0)

    def work(jit):
        model = keras.Sequential([Scales()])
        model.compile(jit_compile=jit)
        batches = [torch.ones(4, 3) for _ in range(8)]
        for batch in batches[4:]:
            batch.scale = 2.0
        return predictions(model, batches)

    ((eager, captured),) = run_ranks(lambda rank: compared(work), 1)
    assert captured == eager == [1.0] * 4 + [2.0] * 4


def test_what_a_library_sets_on_one_rank_alone_is_no_change(monkeypatch):
    """As a logger does that is imported on rank 0: filters of what is shown, registered classes."""
    monkeypatch.setenv("SHARDCORE_CAPTURE", "at-once")

    def program(rank):
        class Checks(keras.layers.Layer):
            sizes = (2, 3)

            def call(self, x):
                if not isinstance(self.sizes, Sized):
                    warnings.warn("no sizes", stacklevel=2)
                return x * self.sizes[0]

        warnings.resetwarnings()  # pytest makes errors of warnings
        distribute((2, 1))
        model = keras.Sequential([Checks()])
        said = messages()
        batch = np.ones((4, 3), "float32")
        before = predictions(model, [batch] * 4)
        if rank == 0:
            warnings.filterwarnings("ignore", module="a_logger")
            numbers.Number.register(type("Own", (), {}))
        return before + predictions(model, [batch] * 4), said

    for found, said in run_ranks(program, 2):
        assert found == [2.0] * 8
        assert said == []
