"""Models whose steps are traced without values, their batches, and what a step moves."""

from collections import Counter

import keras
import numpy as np
from keras import layers

import shardcore
from shardcore.testing import count_collectives
from tests.distributed.models import Block

ROWS = 8


def decoder():
    tokens = keras.Input((16,), dtype="int32")
    h = layers.Embedding(512, 64, name="embedding")(tokens)
    h = Block(64, 4, name="block")(h)
    model = keras.Model(tokens, layers.Dense(512, name="head")(h))
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile("adam", loss, metrics=["accuracy"], jit_compile=False)
    return model


class Pair(layers.Layer):
    """Up, and down."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.up = layers.Dense(256, activation="relu", name="up")
        self.down = layers.Dense(96, name="down")

    def call(self, x):
        return self.down(self.up(x))


def mlp():
    """Six equal blocks: a trace has four of them."""
    x = h = keras.Input((96,))
    for number in range(6):
        h = Pair(name=f"pair_{number}")(h)
    model = keras.Model(x, h)
    model.compile(keras.optimizers.SGD(0.1, momentum=0.9), "mse", jit_compile=False)
    return model


def tokens():
    """Two layers that both a sequence's axis and a model's axis shard."""
    x = keras.Input((8, 32))
    model = keras.Model(x, Pair(name="pair")(x))
    model.compile("sgd", "mse", jit_compile=False)
    return model


class Experts(layers.Layer):
    """Four experts, to each of which a row sends two tokens."""

    def build(self, shape):
        self.up = self.add_weight(shape=(4, 32, 128), name="up")
        self.down = self.add_weight(shape=(4, 128, 32), name="down")

    def call(self, x):
        h = keras.ops.einsum("gecd,edh->gech", keras.ops.reshape(x, (-1, 4, 2, 32)), self.up)
        h = keras.ops.einsum("gech,ehd->gecd", keras.ops.relu(h), self.down)
        return keras.ops.reshape(h, (-1, 8, 32))


def experts():
    x = keras.Input((8, 32))
    h = layers.Dense(32, name="before")(x)
    model = keras.Model(x, layers.Dense(32, name="after")(Experts(name="experts")(h)))
    model.compile("adam", "mse", jit_compile=False)
    return model


def norms():
    """Three equal kernels, of 1 MiB each, that are in no pair."""
    x = h = keras.Input((512,))
    for name in ("first", "second", "third"):
        h = layers.LayerNormalization(name=f"{name}_norm")(layers.Dense(512, name=name)(h))
    model = keras.Model(x, h)
    model.compile("adam", "mse", jit_compile=False)
    return model


class Unnamed(layers.Layer):
    """A block whose layers have the names that Keras counts on."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.norm = layers.LayerNormalization()
        self.up = layers.Dense(128, activation="relu")
        self.down = layers.Dense(32)

    def call(self, x):
        return x + self.down(self.up(self.norm(x)))


def unnamed():
    x = h = keras.Input((8, 32))
    for number in range(6):
        h = Unnamed(name=f"block_{number}")(h)
    model = keras.Model(x, layers.Dense(32, name="head")(h))
    model.compile("adam", "mse", jit_compile=False)
    return model


class Scale(layers.Layer):
    """A weight of half a MiB, which the backward pass reads again."""

    def build(self, shape):
        self.scale = self.add_weight(shape=(2**17,), initializer="ones", name="scale")

    def call(self, x):
        return x * self.scale


SCALES = 56  # 28 MiB


def scales():
    x = h = keras.Input((2**17,))
    for number in range(SCALES):
        h = Scale(name=f"scale_{number}")(h)
    model = keras.Model(x, h)
    model.compile(keras.optimizers.SGD(0.1), "mse", jit_compile=False)
    return model


TOKENS = np.zeros((ROWS, 16), "int32")
NUMBERS = np.zeros((ROWS, 96), "float32")
GROUPS = np.zeros((ROWS, 8, 32), "float32")
WIDE = np.zeros((2, 2**17), "float32")
BATCHES = {
    decoder: (TOKENS, TOKENS),
    mlp: (NUMBERS, NUMBERS),
    experts: (GROUPS, GROUPS),
    tokens: (GROUPS, np.zeros((ROWS, 8, 96), "float32")),
    norms: (np.zeros((ROWS, 512), "float32"),) * 2,
    unnamed: (GROUPS, GROUPS),
    scales: (WIDE, WIDE),
}


def moved_in(step):
    """Returns the number and the bytes of the collectives of a step, by kind."""
    calls, operand_bytes = Counter(), Counter()
    for collective in step.collectives:
        kind = "all_to_all" if collective.kind == "send" else collective.kind
        calls[kind] += collective.times
        operand_bytes[kind] += collective.times * collective.operand_bytes
    return dict(calls), dict(operand_bytes)


def counted(_, build, asked):
    """Returns the collectives of a real rank, for each candidate."""
    found = []
    for candidate in asked:
        keras.utils.clear_session(free_memory=False)
        shardcore.install()
        mesh = keras.distribution.DeviceMesh(candidate.mesh.shape, candidate.mesh.axis_names)
        shardcore.plan(build, mesh, candidate.policy, **candidate.options).distribute()
        model, batch = build(), BATCHES[build]
        model.train_on_batch(*batch)
        with count_collectives() as traffic:
            model.train_on_batch(*batch)
        found.append((candidate, dict(traffic.calls), dict(traffic.operand_bytes)))
    return found
