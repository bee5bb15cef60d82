"""A small decoder: plain Keras, which knows nothing of meshes."""

import keras
from keras import layers


def decoder(length: int, vocabulary: int = 256, width: int = 128, heads: int = 4, blocks: int = 2):
    """Predicts from each prefix of a window of `length` tokens the token that follows it."""
    tokens = keras.Input((length,), dtype="int32")
    x = Embeddings(vocabulary, length, width, name="embeddings")(tokens)
    for number in range(blocks):
        x = Block(width, heads, name=f"block_{number}")(x)
    x = layers.LayerNormalization(name="last_norm")(x)
    return keras.Model(tokens, layers.Dense(vocabulary, name="logits")(x))


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
