"""The Keras models that are measured. They know nothing of meshes, nor of a backend."""

import keras
from keras import layers


def mlp(width: int, hidden: int, blocks: int, classes: int) -> keras.Model:
    """Pairs of layers: up to `hidden`, and down to `width`."""
    inputs = x = keras.Input((width,))
    for number in range(blocks):
        x = Pair(width, hidden, name=f"block_{number}")(x)
    return keras.Model(inputs, layers.Dense(classes, name="logits")(x))


def cnn(size: int, filters: int, blocks: int, classes: int) -> keras.Model:
    """Convolutions with batch normalization; each block halves the image and doubles its depth."""
    inputs = x = keras.Input((size, size, 3))
    for number in range(blocks):
        x = Stage(filters * 2**number, name=f"block_{number}")(x)
    x = layers.GlobalAveragePooling2D(name="pool")(x)
    return keras.Model(inputs, layers.Dense(classes, name="logits")(x))


def decoder(vocabulary: int, width: int, blocks: int, heads: int, length: int) -> keras.Model:
    """Predicts from each prefix of a window of `length` tokens the token that follows it."""
    inputs = keras.Input((length,), dtype="int32")
    x = Embeddings(vocabulary, length, width, name="embeddings")(inputs)
    for number in range(blocks):
        x = Block(width, heads, name=f"block_{number}")(x)
    x = layers.LayerNormalization(name="last_norm")(x)
    return keras.Model(inputs, layers.Dense(vocabulary, name="logits")(x))


class Pair(layers.Layer):
    """Up and down, each with a ReLU."""

    def __init__(self, width: int, hidden: int, **kwargs):
        super().__init__(**kwargs)
        self.up = layers.Dense(hidden, activation="relu", name="up")
        self.down = layers.Dense(width, activation="relu", name="down")

    def call(self, x):
        return self.down(self.up(x))


class Stage(layers.Layer):
    """Convolution, batch normalization, ReLU, pooling."""

    def __init__(self, filters: int, **kwargs):
        super().__init__(**kwargs)
        self.conv = layers.Conv2D(filters, 3, padding="same", use_bias=False, name="conv")
        self.norm = layers.BatchNormalization(name="norm")
        self.pool = layers.MaxPooling2D(name="pool")

    def call(self, x, training=None):
        return self.pool(keras.ops.relu(self.norm(self.conv(x), training=training)))


class Embeddings(layers.Layer):
    """Token and position."""

    def __init__(self, vocabulary: int, length: int, width: int, **kwargs):
        super().__init__(**kwargs)
        self.token = layers.Embedding(vocabulary, width, name="token")
        self.position = layers.Embedding(length, width, name="position")

    def call(self, tokens):
        return self.token(tokens) + self.position(keras.ops.arange(tokens.shape[1]))


class Block(layers.Layer):
    """Pre-norm attention and a hidden layer, each beside a short cut."""

    def __init__(self, width: int, heads: int, **kwargs):
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
