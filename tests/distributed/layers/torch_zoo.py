"""Plain torch modules of many kinds, and rows for them."""

import keras
import numpy as np
import torch
from torch import nn

RANDOM = np.random.default_rng(0)
ROWS = RANDOM.normal(size=(6, 4)).astype("float32")


class Pictures(nn.Module):
    """Convolutions, batch statistics of three kinds, one of them without a parameter."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(
            nn.InstanceNorm2d(4, track_running_stats=True),
            nn.Conv2d(4, 8, 3),
            nn.BatchNorm2d(8),
            nn.ReLU(),
            nn.Conv2d(8, 6, 2),
            nn.GroupNorm(2, 6),
        )

    def forward(self, x):
        return self.body(x).flatten(1)


class Text(nn.Module):
    """Attention and recurrence; a tied table; state that is neither parameter nor buffer."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(10, 4)
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True)
        self.norm = nn.LayerNorm(4)
        self.lstm = nn.LSTM(4, 6, batch_first=True)
        self.down = nn.Linear(6, 4)
        self.logits = nn.Linear(4, 10, bias=False)
        self.logits.weight = self.table.weight
        self.regularized = [self.down.weight]
        self.scale = torch.arange(1.0, 5.0)
        self.seen = torch.zeros(4)

    def forward(self, tokens):
        x = self.table(tokens)
        with torch.no_grad():
            self.seen += x.sum((0, 1))
        x = self.norm(x + self.attention(x, x, x)[0]) * self.scale
        hidden = self.down(self.lstm(x)[0])
        return self.logits(hidden).mean(1) + 0.1 * self.regularized[0].sum()


class Head(keras.layers.Layer):
    """Keras wraps a torch module that is assigned to an attribute."""

    def __init__(self, **options):
        super().__init__(**options)
        self.dense = nn.Linear(16, 4)

    def call(self, x):
        return self.dense(x)


def zoo():
    keras.utils.set_random_seed(1)
    pictures = keras.Input((4, 5, 5))
    tokens = keras.Input((3,), dtype="int64")
    wrap = keras.layers.TorchModuleWrapper
    seen = wrap(Pictures(), name="pictures", output_shape=(None, 24))(pictures)
    read = wrap(Text(), name="text", output_shape=(None, 10))(tokens)
    joined = keras.layers.Concatenate()([keras.layers.Dense(6, name="seen")(seen), read])
    head = Head(name="head")
    head.compute_output_shape = lambda _: (None, 4)
    return keras.Model([pictures, tokens], head(joined))


def mlp():
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.BatchNorm1d(8), nn.Linear(8, 4))


MEGATRON = {"0.weight": ("model", None), "0.bias": ("model",), "3.weight": (None, "model")}


def wrapped(module):
    layer = keras.layers.TorchModuleWrapper(module, name="mlp", output_shape=(None, 4))
    model = keras.Sequential([keras.Input((4,)), layer])
    model.compile(keras.optimizers.SGD(0.1), "mse")
    return model
