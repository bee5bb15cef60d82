"""A layer that reads something in its call, and its predictions while that changes."""

import keras
import numpy as np

import shardcore
from tests.distributed.capture.steps import messages

BATCH = np.ones((4, 3), "float32")


class Reads(keras.layers.Layer):
    """Multiplies its input by what it reads."""

    def __init__(self, read):
        super().__init__()
        self.read = read

    def call(self, x):
        return x * self.read()


def predictions(read, change, jit):
    """Returns the predictions of four steps, and of four after the change."""
    model = keras.Sequential([Reads(read)])
    model.compile(jit_compile=jit)
    numbers = []
    for index in range(8):
        if index == 4:
            change()
        numbers.append(float(np.mean(model.predict_on_batch(BATCH))))
    return numbers


def compared(make):
    """Returns the predictions of eager steps, and of captured ones.

    Args:
        make: Returns what the layer reads, what changes that, and what undoes it.
    """
    of_both = []
    for jit in (False, "auto"):
        read, change, *undo = make()
        try:
            of_both.append(predictions(read, change, jit))
        finally:
            for restore in undo:
                restore()
    return of_both


def compare_all(cases):
    """Returns the predictions of each case by its name, and the names of those that are refused."""
    shardcore.install("single")
    said, numbers, refused = messages(), {}, []
    for make in cases:
        numbers[make.__name__] = compared(make)
        refused += [make.__name__] * any("is not captured" in text for text in said)
        said.clear()
    return numbers, refused


def check(numbers):
    """Checks that each change made a difference, and the same one in captured steps."""
    unchanged = [name for name, (eager, _) in numbers.items() if eager[3] == eager[4]]
    assert unchanged == [], "the change made no difference"
    stale = [name for name, (eager, captured) in numbers.items() if captured != eager]
    assert stale == []
