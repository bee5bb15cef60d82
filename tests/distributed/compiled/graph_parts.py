"""Parts of models whose steps become CUDA graphs."""

import keras
from keras import layers


def attention(x):
    h = layers.MultiHeadAttention(4, 4)(x, x, use_causal_mask=True)
    return layers.Dropout(0.2)(layers.LayerNormalization()(x + h))


def convolution(x):
    return layers.BatchNormalization()(layers.Conv1D(16, 3, padding="same")(x))


def recurrent(x):
    return layers.LSTM(16, return_sequences=True)(x)


def drawing(x):
    return layers.GaussianNoise(0.1, seed=3)(x)


class Reads(layers.Layer):
    """Computes by a number that it reads on the host, the same in each step."""

    def call(self, x):
        is_real = not keras.backend.is_keras_tensor(x)
        return x * 2 if is_real and float(keras.ops.stop_gradient(0 * x).max()) == 0 else x


def reading(x):
    return layers.Dense(16)(layers.Dense(16)(Reads()(x)))


def reading_late(x):
    """Without attention, whose gradient reads states of torch's generator on the host."""
    for _ in range(2):
        x = layers.Dropout(0.2)(layers.LayerNormalization()(layers.Dense(16)(x)))
    return Reads()(x)
