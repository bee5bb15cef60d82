"""Layers in the ways that people write functions: helpers, closures, decorators, logging, loops."""

import contextlib
import copy
import functools
import itertools
import logging
import math
import operator
import os
import warnings

import keras
import packaging.version
from keras import ops

from tests.distributed.capture.idioms import helpers
from tests.distributed.capture.idioms.helpers import softened

logger = logging.getLogger(__name__)
IS_NEW_KERAS = packaging.version.Version(keras.__version__) >= packaging.version.Version("3.1")
DEBUG = bool(os.environ.get("MY_PROJECT_DEBUG"))


class Calls(keras.layers.Layer):
    """A layer that calls what it holds."""

    def __init__(self, function, **kwargs):
        super().__init__(**kwargs)
        self.function = function

    def call(self, inputs):
        return self.function(inputs)


def scaled(inputs, rate, offset=0.0):
    return inputs * rate + offset


def partial_function():
    return Calls(functools.partial(scaled, rate=0.5, offset=1.0))


def lru_cached_helper():
    class Encoded(keras.layers.Layer):
        def call(self, inputs):
            frequencies = helpers.frequencies(inputs.shape[-1])
            return inputs * ops.convert_to_tensor(frequencies, dtype=inputs.dtype)

    return Encoded()


def closure_over_settings():
    def make(rate, *, squash=True):
        options = {"limit": 3.0}

        def function(inputs):
            outputs = inputs * rate
            return ops.clip(outputs, -options["limit"], options["limit"]) if squash else outputs

        return function

    return Calls(make(0.5))


def default_and_variadic_arguments():
    def combined(inputs, *offsets, rate=0.5, names=("a", "b"), **options):
        total = sum(offsets) + len(names) + options.get("bias", 0.0)
        return inputs * rate + total

    class Combined(keras.layers.Layer):
        def call(self, inputs, *args, **kwargs):
            return combined(inputs, 1.0, 2.0, *args, bias=0.5, **kwargs)

    return Combined()


def checks_rank(rank):
    def decorate(function):
        @functools.wraps(function)
        def wrapper(self, inputs, *args, **kwargs):
            if len(inputs.shape) != rank:
                raise ValueError(f"{function.__name__} takes {rank} dims, not {inputs.shape}")
            return function(self, inputs, *args, **kwargs)

        return wrapper

    return decorate


def decorator_with_wraps():
    class Checked(keras.layers.Layer):
        @checks_rank(2)
        def call(self, inputs):
            return inputs * 0.5

    return Checked()


def logging_calls():
    class Logged(keras.layers.Layer):
        def call(self, inputs):
            logger.debug("inputs of %s have shape %s", self.name, inputs.shape)
            if logger.isEnabledFor(logging.DEBUG):
                logger.debug("rows: %d", inputs.shape[0])
            return inputs * 0.5

    return Logged()


def warning_of_an_old_option():
    class Old(keras.layers.Layer):
        def __init__(self, rate=None):
            super().__init__()
            self.rate = rate

        def call(self, inputs):
            if self.rate is None:
                warnings.warn("rate will be required", DeprecationWarning, stacklevel=2)
            return inputs * (self.rate or 0.5)

    return Old()


def print_while_debugging():
    class Printed(keras.layers.Layer):
        def call(self, inputs, training=False):
            if DEBUG:
                print("inputs", inputs.shape)
            print(f"{self.name}: {'training' if training else 'inference'}", end="")
            print("", end="")
            return inputs * 0.5

    return Printed()


@contextlib.contextmanager
def described(name):
    try:
        yield name.upper()
    except ValueError as error:
        raise ValueError(f"in {name}") from error


def context_managers():
    class Described(keras.layers.Layer):
        def call(self, inputs):
            with (
                described(self.name) as text,
                keras.name_scope("inner"),
                contextlib.suppress(KeyError),
            ):
                return inputs * (0.5 if text.isupper() else 1.0)
            return inputs

    return Described()


def comprehensions_and_generators():
    class Chunked(keras.layers.Layer):
        def __init__(self, sizes=(2, 4)):
            super().__init__()
            self.sizes = sizes

        def chunks(self, inputs):
            start = 0
            for size in self.sizes:
                yield inputs[:, start : start + size]
                start += size

        def call(self, inputs):
            parts = [ops.tanh(part) for part in self.chunks(inputs) if part.shape[-1] > 1]
            weights = {index: 1.0 / (index + 1) for index, _ in enumerate(parts)}
            return ops.concatenate(
                [part * weights[index] for index, part in enumerate(parts)], axis=-1
            ) * max(size for size in self.sizes)

    return Chunked()


def itertools_and_operator():
    class Pairs(keras.layers.Layer):
        def call(self, inputs):
            columns = [inputs[:, index] for index in range(3)]
            products = list(itertools.starmap(operator.mul, itertools.combinations(columns, 2)))
            order = sorted([(2, "b"), (0, "a"), (1, "c")], key=operator.itemgetter(0))
            total = functools.reduce(operator.add, (products[index] for index, _ in order))
            return ops.expand_dims(total, -1) * sum(itertools.chain([0.25], (0.25,)))

    return Pairs()


def walrus_and_match():
    class Matched(keras.layers.Layer):
        def __init__(self, spec):
            super().__init__()
            self.spec = spec

        def call(self, inputs):
            match self.spec:
                case {"kind": "scale", "rate": float(rate)}:
                    outputs = inputs * rate
                case ("shift", offset):
                    outputs = inputs + offset
                case _:
                    raise ValueError(self.spec)
            if (size := outputs.shape[-1]) and size > 2:
                outputs = outputs[:, : size - 1]
            return outputs

    return Matched({"kind": "scale", "rate": 0.5})


def local_imports_and_functions():
    class Local(keras.layers.Layer):
        def call(self, inputs):
            import math as m

            from tests.distributed.capture.idioms.helpers import DEFAULT_RATE

            def inner(values, power=2):
                return values**power * DEFAULT_RATE

            return inner(inputs) * m.sqrt(2.0)

    return Local()


def helpers_of_the_package():
    class Softened(keras.layers.Layer):
        def call(self, inputs):
            return softened(helpers.squared_relu(inputs), power=2)

    return Softened()


def flags_of_the_environment():
    class Flagged(keras.layers.Layer):
        def call(self, inputs):
            rate = float(os.environ.get("MY_PROJECT_RATE", "0.5"))
            if os.getenv("MY_PROJECT_SAFE_MODE") is not None or helpers.is_fast_mode():
                return inputs
            return inputs * rate

    return Flagged()


def formatted_names():
    class Named(keras.layers.Layer):
        def __init__(self):
            super().__init__()
            self.rate_0, self.rate_1 = 0.5, 0.25
            self.dense_0, self.dense_1 = keras.layers.Dense(4), keras.layers.Dense(4)

        def call(self, inputs):
            for index in range(2):
                layer = getattr(self, f"dense_{index}")
                inputs = layer(inputs) * getattr(self, "rate_" + str(index))
            return inputs

    return Named()


def version_of_a_library():
    class Versioned(keras.layers.Layer):
        def call(self, inputs):
            current = packaging.version.parse(keras.__version__)
            if IS_NEW_KERAS and current >= packaging.version.parse("3.0"):
                return ops.silu(inputs)
            return inputs * ops.sigmoid(inputs)

    return Versioned()


def copies_of_settings():
    class Copying(keras.layers.Layer):
        def __init__(self, options):
            super().__init__()
            self.options = copy.deepcopy(options)

        def call(self, inputs):
            options = copy.copy(self.options)
            options["rate"] *= 0.5
            options.setdefault("bias", 1.0)
            size = 2 ** math.ceil(math.log2(inputs.shape[-1]))
            return inputs * (options["rate"] / math.sqrt(size)) + options["bias"]

    return Copying({"rate": 0.5, "nested": {"axes": [0, 1]}})


IDIOMS = (
    *(partial_function, lru_cached_helper, closure_over_settings, default_and_variadic_arguments),
    *(decorator_with_wraps, logging_calls, warning_of_an_old_option),
    *(print_while_debugging, context_managers, comprehensions_and_generators),
    *(itertools_and_operator, walrus_and_match, local_imports_and_functions),
    *(helpers_of_the_package, flags_of_the_environment, formatted_names),
    *(version_of_a_library, copies_of_settings),
)
