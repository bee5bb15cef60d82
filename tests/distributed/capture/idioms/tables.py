"""Layers that look things up: in arrays, mappings, registries, constants of a module or a class."""

import collections
import types
import typing

import keras
import numpy as np
from keras import ops

from tests.distributed.capture.idioms.configs import ScaledDense
from tests.distributed.capture.idioms.helpers import ACTIVATIONS

# 2 MB each: more than a guard would copy for each of its values
POSITIONS = np.sin(np.arange(524_288, dtype="float32")).reshape(-1, 8)
GAIN = 0.5
LEVELS = ("low", "high")


def mapping_proxy():
    class Block(ScaledDense):
        DEFAULTS = types.MappingProxyType({"rate": 0.5, "bias": 0.0})

        def factor(self):
            return self.DEFAULTS["rate"] + self.DEFAULTS["bias"]

    return Block()


def chain_of_maps():
    class Block(ScaledDense):
        def __init__(self, **overrides):
            super().__init__()
            self.settings = collections.ChainMap(overrides, {"rate": 0.5, "bias": 0.25})

        def factor(self):
            return self.settings["rate"] + self.settings["bias"]

    return Block(rate=2.0)


def collections_of_settings():
    class Block(ScaledDense):
        def __init__(self):
            super().__init__()
            self.rates = collections.OrderedDict([("first", 0.5), ("second", 0.25)])
            self.shares = collections.defaultdict(lambda: 1.0, first=2.0)
            self.counts = collections.Counter("aab")
            self.recent = collections.deque([1.0, 2.0], maxlen=2)

        def factor(self):
            total = sum(rate * self.shares[name] for name, rate in self.rates.items())
            return total * self.counts["a"] * self.recent[-1]

    block = Block()
    block.shares["second"] = 1.0
    return block


def numpy_table_of_a_layer():
    class Positions(keras.layers.Layer):
        def __init__(self):
            super().__init__()
            self.table = np.cos(np.arange(524_288, dtype="float32")).reshape(-1, 8)

        def call(self, inputs):
            return inputs + ops.convert_to_tensor(self.table[:8, :6].mean(axis=0))

    return Positions()


def numpy_table_of_a_module():
    class Positions(keras.layers.Layer):
        def call(self, inputs):
            return inputs + ops.convert_to_tensor(POSITIONS[3, :6])

    return Positions()


def constants_of_module_and_class():
    class Block(ScaledDense):
        SCALE = 2.0
        NAMES = ("first", "second")
        LIMITS: typing.ClassVar[dict[str, float]] = {"low": -1.0, "high": 1.0}

        def factor(self):
            level = LEVELS.index("high") * GAIN * self.SCALE * len(self.NAMES)
            return min(level, type(self).LIMITS["high"])

    return Block()


def registry_of_functions():
    class Activated(keras.layers.Layer):
        def __init__(self, name):
            super().__init__()
            self.function_name = name

        def call(self, inputs):
            return ACTIVATIONS[self.function_name](inputs)

    return Activated("scaled_tanh")


@keras.saving.register_keras_serializable(package="idioms")
class Registered(keras.layers.Layer):
    def __init__(self, units, activation="relu", kernel_initializer="glorot_uniform", **kwargs):
        super().__init__(**kwargs)
        self.units = units
        self.activation = keras.activations.get(activation)
        self.kernel_initializer = keras.initializers.get(kernel_initializer)

    def build(self, input_shape):
        shape = (input_shape[-1], self.units)
        self.kernel = self.add_weight(shape=shape, initializer=self.kernel_initializer)

    def call(self, inputs):
        return self.activation(ops.matmul(inputs, self.kernel))

    def get_config(self):
        return {
            **super().get_config(),
            "units": self.units,
            "activation": keras.activations.serialize(self.activation),
            "kernel_initializer": keras.initializers.serialize(self.kernel_initializer),
        }


def registered_layer_from_its_config():
    return Registered.from_config(Registered(4, "gelu").get_config())


IDIOMS = (
    *(mapping_proxy, chain_of_maps, collections_of_settings, numpy_table_of_a_layer),
    *(numpy_table_of_a_module, constants_of_module_and_class, registry_of_functions),
    registered_layer_from_its_config,
)
