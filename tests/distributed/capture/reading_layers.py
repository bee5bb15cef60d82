"""Layers and losses for which torch or Keras reads values, and a layer that reads its own."""

import keras
import numpy as np

from tests.distributed.capture.steps import Spy, is_real


class OneHot(Spy):
    def call(self, x):
        x = super().call(x)
        return x + keras.ops.one_hot(keras.ops.cast(x[:, 0], "int32"), 4)


class Drawing(Spy):
    """Adds a draw to its input."""

    def __init__(self, draw, **kwargs):
        super().__init__(**kwargs)
        self.draw, self.seeds = draw, keras.random.SeedGenerator(3)

    def call(self, x):
        x = super().call(x)
        return x + self.draw(x.shape, seed=self.seeds) if is_real(x) else x


def gamma(shape, seed):
    return keras.random.gamma(shape, 2.0, seed=seed)


def beta(shape, seed):
    return keras.random.beta(shape, 2.0, keras.ops.full(shape, 0.5), seed=seed)


def binomial(shape, seed):
    return keras.random.binomial(shape, 3.0, 0.5, seed=seed)


def network(layer, head):
    def build():
        x = keras.Input((4,))
        return keras.Model(x, head()(layer()(x)))

    return build


def dense():
    return keras.layers.Dense(4, name="head")


def normalized():
    return keras.layers.SpectralNormalization(dense())


LAYERS = {
    "one_hot": (network(OneHot, dense), "adam"),
    "gamma": (network(lambda: Drawing(gamma), dense), "adam"),
    "beta": (network(lambda: Drawing(beta), dense), "adam"),
    "binomial": (network(lambda: Drawing(binomial), dense), "adam"),
    "spectral": (network(Spy, normalized), "adam"),
    "nadam": (network(Spy, dense), "nadam"),
}


class Options:
    __slots__ = ("factor",)

    def __init__(self):
        self.factor = 1.0


class Holding(Spy):
    power, gain, shift, root = 1.0, 1.5, 2.0, 1.0

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.array, self.options = np.ones(2, "float32"), Options()
        self.table, self.gain, self.shift = [[1.0]], 1.0, None

    def call(self, x):
        factor = self.gain * self.table[0][0] * self.options.factor * type(self).power
        return super().call(x) * (factor * float(self.array[1]) * self.root) + (self.shift or 0.0)


def in_an_array(layer):
    layer.array[1] = 2.0


def in_a_list_of_a_list(layer):
    layer.table[0][0] = 3.0


def in_a_slot(layer):
    layer.options.factor = 0.1


def in_the_class(layer):
    type(layer).power = 0.5


def by_the_class_alone(layer):
    del layer.gain


def by_the_class_and_not_none(layer):
    del layer.shift


def in_the_object_and_not_its_class(layer):
    layer.root = 0.5


CHANGES_WITHIN = (
    *(in_an_array, in_a_list_of_a_list, in_a_slot, in_the_class),
    *(by_the_class_alone, by_the_class_and_not_none, in_the_object_and_not_its_class),
)
