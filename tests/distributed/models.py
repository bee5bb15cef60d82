"""Small models, and a batch for each: an MLP, a CNN, a decoder, blocks of other kinds."""

import keras
import numpy as np
from keras import layers

RNG = np.random.default_rng(0)
VOCABULARY = 65  # not even


def mlp():
    return keras.Sequential(
        [keras.Input((16,)), *(layers.Dense(n, activation="relu") for n in (48, 32, 24, 7))]
    )


def cnn():
    x = keras.Input((6, 6, 3))
    h = layers.Conv2D(8, 3, padding="same", name="c1")(x)
    h = layers.ReLU()(layers.BatchNormalization()(h))
    h = layers.MaxPooling2D()(layers.Dropout(0.25)(h))
    h = layers.Conv2D(12, 3, padding="same", activation="relu", name="c2")(h)
    h = layers.Conv2D(10, 3, padding="same", activation="relu", name="c3")(h)
    return keras.Model(x, layers.Dense(7, name="classes")(layers.GlobalAveragePooling2D()(h)))


class Block(layers.Layer):
    """A decoder block of unknown graph."""

    def __init__(self, width, heads, **kwargs):
        super().__init__(**kwargs)
        self.attention_norm = layers.LayerNormalization(name="attention_norm")
        self.attention = layers.MultiHeadAttention(heads, width // heads, name="attention")
        self.mlp_norm = layers.LayerNormalization(name="mlp_norm")
        self.expand = layers.Dense(4 * width, activation="gelu", name="expand")
        self.contract = layers.Dense(width, name="contract")

    def call(self, x):
        normed = self.attention_norm(x)
        x = x + self.attention(normed, normed, use_causal_mask=True)
        return x + self.contract(self.expand(self.mlp_norm(x)))


def decoder():
    tokens = keras.Input((6,), dtype="int32")
    h = layers.Embedding(VOCABULARY, 16, name="tokens")(tokens)
    h = Block(16, 4, name="block_0")(h)
    return keras.Model(tokens, layers.Dense(VOCABULARY, name="logits")(h))


def grouped(key_heads=1):
    """A block with grouped queries and a gated hidden layer, as a graph."""
    x = keras.Input((6, 16))
    h = layers.LayerNormalization(name="n1")(x)
    h = x + layers.GroupQueryAttention(4, 4, key_heads, name="attention")(h, h)
    g = layers.LayerNormalization(name="n2")(h)
    gated = layers.Dense(32, activation="silu", name="gate")(g) * layers.Dense(32, name="up")(g)
    return keras.Model(x, h + layers.Dense(16, name="down")(gated))


class Experts(layers.Layer):
    """A bank of experts, which all see each token."""

    def build(self, shape):
        self.up = self.add_weight(shape=(4, shape[-1], 24), name="up")
        self.down = self.add_weight(shape=(4, 24, shape[-1]), name="down")

    def call(self, x):
        hidden = keras.ops.relu(keras.ops.einsum("btc,ecm->ebtm", x, self.up))
        return keras.ops.einsum("ebtm,emc->ebtc", hidden, self.down)


class MixtureBlock(layers.Layer):
    """An attention with one kernel for query, key and value, and a mixture of experts."""

    def __init__(self, width, num_heads, **kwargs):
        super().__init__(**kwargs)
        self.num_heads = num_heads
        self.attention_qkv = layers.Dense(3 * width, name="attention_qkv")
        self.attention_proj = layers.Dense(width, name="attention_proj")
        self.router = layers.Dense(4, activation="softmax", name="router")
        self.experts = Experts(name="experts")

    def call(self, x):
        heads = (-1, x.shape[1], 3, self.num_heads, x.shape[2] // self.num_heads)
        q, k, v = keras.ops.unstack(keras.ops.reshape(self.attention_qkv(x), heads), axis=2)
        attended = keras.ops.dot_product_attention(q, k, v)
        x = x + self.attention_proj(keras.ops.reshape(attended, (-1, *x.shape[1:])))
        shares = keras.ops.transpose(self.router(x), (2, 0, 1))
        return x + keras.ops.sum(self.experts(x) * shares[..., None], axis=0)


def mixture():
    x = keras.Input((6, 16))
    return keras.Model(x, MixtureBlock(16, 4, name="block")(x))


TOKENS = RNG.integers(0, VOCABULARY, (8, 6))
CASES = {
    mlp: (RNG.normal(size=(8, 16)).astype("float32"), RNG.normal(size=(8, 7)).astype("float32")),
    cnn: (RNG.normal(size=(8, 6, 6, 3)).astype("float32"), RNG.normal(size=(8, 7))),
    decoder: (TOKENS, TOKENS),
    grouped: (RNG.normal(size=(8, 6, 16)).astype("float32"), RNG.normal(size=(8, 6, 16))),
}
CASES[mixture] = CASES[grouped]
