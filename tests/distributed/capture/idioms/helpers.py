"""Functions and constants that the idioms import, as a package's `utils.py` has them."""

import functools
import math
import os

from keras import ops

DEFAULT_RATE = 0.5
ACTIVATIONS = {}


def register(name):
    """Puts a function into the table of activations."""

    def put(function):
        ACTIVATIONS[name] = function
        return function

    return put


@register("squared_relu")
def squared_relu(inputs):
    return ops.square(ops.relu(inputs))


@register("scaled_tanh")
def scaled_tanh(inputs, scale=1.5):
    return scale * ops.tanh(inputs)


@functools.lru_cache(maxsize=128)
def frequencies(size, base=100.0):
    return tuple(base ** (-step / size) for step in range(size))


@functools.cache
def is_fast_mode():
    return os.environ.get("MY_PROJECT_FAST_MODE", "0") == "1"


def softened(inputs, rate=DEFAULT_RATE, **options):
    power = options.pop("power", 1)
    return _apply_rate(inputs, rate) * math.pow(2.0, -power)


def _apply_rate(inputs, rate):
    return inputs * rate
