"""Layers and losses for which torch or Keras reads values."""

import keras

from tests.distributed.capture.steps import (
    Spy,
    is_real,
)


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
