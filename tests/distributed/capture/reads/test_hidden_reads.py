"""Reads of Python code without a name that says so: they are seen, or the step runs eagerly."""

import keras
import numpy as np
import pytest
import torch

import shardcore
from shardcore.testing import run_ranks
from tests.distributed.capture.reads.hidden_reads import REFUSED, SEEN, text_of_error
from tests.distributed.capture.steps import messages

BATCH = np.ones((4, 3), "float32")


class Reads(keras.layers.Layer):
    """Multiplies its input by what it reads."""

    def __init__(self, read):
        super().__init__()
        self.read = read

    def call(self, x):
        return x * self.read()


def predictions(read, change, jit, batches=(BATCH,) * 8):
    model = keras.Sequential([Reads(read)])
    model.compile(jit_compile=jit)
    numbers = []
    for index, batch in enumerate(batches):
        if index == 4:
            change()
        numbers.append(float(np.mean(model.predict_on_batch(batch))))
    return numbers


def compared(make):
    """Returns the predictions of eager steps, and of captured ones."""
    of_both = []
    for jit in (False, "auto"):
        read, change, *undo = make()
        try:
            of_both.append(predictions(read, change, jit))
        finally:
            for undo_one in undo:
                undo_one()
    return of_both


def test_what_has_no_name_of_its_own_is_seen(monkeypatch):
    monkeypatch.setenv("SHARDCORE_CAPTURE", "at-once")

    def program(rank):
        shardcore.install("single")
        said, numbers, refused = messages(), {}, []
        for make in (*SEEN, *REFUSED):
            numbers[make.__name__] = compared(make)
            refused += [make.__name__] * any("is not captured" in text for text in said)
            said.clear()
        return numbers, refused

    ((numbers, refused),) = run_ranks(program, 1, timeout=120)
    unchanged = [name for name, (eager, _) in numbers.items() if eager[3] == eager[4]]
    assert unchanged == [], "the change made no difference"
    stale = [name for name, (eager, captured) in numbers.items() if captured != eager]
    assert stale == []
    assert refused == [make.__name__ for make in REFUSED]


def test_the_place_of_a_batch_in_its_memory_is_seen(monkeypatch):
    monkeypatch.setenv("SHARDCORE_CAPTURE", "at-once")

    class Places(keras.layers.Layer):
        def call(self, x):
            return x * (1.0 + x.storage_offset())

    def work(jit):
        model = keras.Sequential([Places()])
        model.compile(jit_compile=jit)
        memory = torch.ones(15)
        batches = [memory[:12].view(4, 3)] * 4 + [memory[3:].view(4, 3)] * 4
        return [float(model.predict_on_batch(batch).mean()) for batch in batches]

    def program(rank):
        shardcore.install("single")
        return work(False), work("auto")

    ((eager, captured),) = run_ranks(program, 1)
    assert captured == eager == [1.0] * 4 + [4.0] * 4


@pytest.mark.parametrize("read", [text_of_error])
def test_the_error_that_is_handled_is_seen(read, monkeypatch):
    monkeypatch.setenv("SHARDCORE_CAPTURE", "at-once")

    def work(jit):
        model = keras.Sequential([Reads(lambda: 1.0 + ("of a test" in read()))])
        model.compile(jit_compile=jit)
        numbers = [float(np.mean(model.predict_on_batch(BATCH))) for _ in range(4)]
        try:
            raise ValueError("of a test")
        except ValueError:
            return numbers + [float(np.mean(model.predict_on_batch(BATCH))) for _ in range(4)]

    def program(rank):
        shardcore.install("single")
        return work(False), work("auto")

    ((eager, captured),) = run_ranks(program, 1)
    assert captured == eager == [1.0] * 4 + [2.0] * 4
