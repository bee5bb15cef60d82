"""The layers that a program may have, by name, and its kinds of input."""

from collections.abc import Callable
from typing import Any

import attrs
import keras
import numpy as np

from tests.fuzz import own_layers

L = keras.layers
TOKENS = 11
STEPS = 5
ACTIVATIONS = ("linear", "relu", "tanh", "gelu", "softmax", "sigmoid")
RANDOM = {"seed": 3}
Builder = Callable[[Any, int, int], Any]


def _beside(x: Any, size: int, variant: int) -> Any:
    """Merges the input with a dense layer of it."""
    merged = (L.Add, L.Multiply, L.Average, L.Maximum, L.Subtract, L.Concatenate)[variant]
    return merged()([x, L.Dense(x.shape[-1])(x)])


def _normed(x: Any, size: int, variant: int) -> Any:
    norms = (
        L.LayerNormalization,
        lambda: L.BatchNormalization(momentum=0.5),
        L.RMSNormalization,
        L.UnitNormalization,
        lambda: L.GroupNormalization(1),
        lambda: L.BatchNormalization(momentum=0.9, scale=False),
    )
    return norms[variant]()(x)


def _dropped(x: Any, size: int, variant: int) -> Any:
    drops = (
        lambda: L.Dropout(0.0),
        lambda: L.Dropout(0.4, **RANDOM),
        lambda: L.GaussianNoise(0.2, **RANDOM),
        lambda: L.AlphaDropout(0.2, **RANDOM),
        lambda: L.GaussianDropout(0.2, **RANDOM),
        lambda: L.ActivityRegularization(0.01),
    )
    return drops[variant]()(x)


def _dense(x: Any, size: int, variant: int) -> Any:
    return L.Dense(size, activation=ACTIVATIONS[variant])(x)


def _regularized(x: Any, size: int, variant: int) -> Any:
    constraints = (None, "max_norm", "non_neg", "unit_norm", None, None)
    return L.Dense(
        size,
        use_bias=variant % 2 == 0,
        kernel_regularizer="l2",
        kernel_constraint=constraints[variant],
    )(x)


def _tied(x: Any, size: int, variant: int) -> Any:
    """Calls one layer twice."""
    shared = L.Dense(x.shape[-1], activation=ACTIVATIONS[variant])
    return shared(shared(x))


def _activated(x: Any, size: int, variant: int) -> Any:
    kinds = (L.PReLU, L.ELU, L.LeakyReLU, lambda: L.Rescaling(0.5, 1.0), L.Softmax, L.ReLU)
    return kinds[variant]()(x)


def _recurrent(x: Any, size: int, variant: int) -> Any:
    kinds = (L.SimpleRNN, L.LSTM, L.GRU)
    layer = kinds[variant % 3](size, return_sequences=True)
    return (L.Bidirectional(layer) if variant > 2 else layer)(x)


def _attended(x: Any, size: int, variant: int) -> Any:
    if variant < 2:
        attended = L.MultiHeadAttention(2, size)(x, x, use_causal_mask=variant == 1)
    elif variant < 4:
        attended = L.GroupQueryAttention(size, 4, 2)(x, x, use_causal_mask=variant == 3)
    else:
        attended = (L.Attention if variant == 4 else L.AdditiveAttention)()([x, x])
    return L.Add()([x, attended])


def _convolved(x: Any, size: int, variant: int) -> Any:
    """A convolution over the steps of a series."""
    kinds = (
        lambda: L.Conv1D(size, 3, padding="same"),
        lambda: L.Conv1D(size, 2, padding="causal", dilation_rate=2),
        lambda: L.SeparableConv1D(size, 3, padding="same"),
        lambda: L.Conv1DTranspose(size, 3, padding="same"),
        lambda: L.AveragePooling1D(2, 1, padding="same"),
        lambda: L.DepthwiseConv1D(3, padding="same"),
    )
    return kinds[variant]()(x)


def _of_steps(x: Any, size: int, variant: int) -> Any:
    """Layers that change the steps of a series."""
    kinds = (
        lambda: L.TimeDistributed(L.Dense(size)),
        lambda: L.ZeroPadding1D(1),
        lambda: L.UpSampling1D(2),
        lambda: L.Permute((2, 1)),
        lambda: L.MaxPooling1D(2, padding="same"),
        lambda: L.EinsumDense("bsd,de->bse", (None, size), bias_axes="e"),
    )
    return kinds[variant]()(x)


def _pictured(x: Any, size: int, variant: int) -> Any:
    kinds = (
        lambda: L.Conv2D(size, 3, padding="same", activation="relu"),
        lambda: L.Conv2D(size, 3, 2, padding="same"),
        lambda: L.SeparableConv2D(size, 3, padding="same"),
        lambda: L.Conv2DTranspose(size, 3, padding="same"),
        lambda: L.DepthwiseConv2D(3, padding="same"),
        lambda: L.Conv2D(4, 1, padding="valid", use_bias=False),
    )
    return kinds[variant]()(x)


def _pooled(x: Any, size: int, variant: int) -> Any:
    kinds = (
        lambda: L.MaxPooling2D(2, padding="same"),
        lambda: L.AveragePooling2D(2, padding="same"),
        lambda: L.UpSampling2D(2),
        lambda: L.ZeroPadding2D(1),
        lambda: L.SpatialDropout2D(0.3, **RANDOM),
        lambda: L.Resizing(4, 4),
    )
    return kinds[variant]()(x)


def _own(layer: type[own_layers.OwnLayer]) -> Builder:
    return lambda x, size, variant: layer(variant, size)(x)


BUILDERS: dict[str, Builder] = {
    "dense": _dense,
    "regularized": _regularized,
    "tied": _tied,
    "beside": _beside,
    "normed": _normed,
    "dropped": _dropped,
    "activated": _activated,
    "in_place": _own(own_layers.InPlace),
    "views": _own(own_layers.Views),
    "counts": _own(own_layers.Counts),
    "operators": _own(own_layers.Operators),
    "nested": _own(own_layers.Nested),
    "recurrent": _recurrent,
    "attended": _attended,
    "convolved": _convolved,
    "of_steps": _of_steps,
    "pictured": _pictured,
    "pooled": _pooled,
}
_OF_ANY = tuple(BUILDERS)[:12]
_OF_SERIES = (*_OF_ANY, "recurrent", "attended", "convolved", "of_steps")


@attrs.frozen
class Kind:
    """A kind of input.

    Args:
        shape: Of a row.
        layers: The names of its layers.
        dtype: Of its numbers: whole numbers are tokens; None for the float type of Keras.
    """

    shape: tuple[int, ...]
    layers: tuple[str, ...]
    dtype: str | None = None

    def rows(self, draw: np.random.Generator, count: int) -> np.ndarray:
        """Draws the input of `count` rows."""
        if self.dtype is None:
            return draw.normal(size=(count, *self.shape)).astype(keras.config.floatx())
        return draw.integers(0, TOKENS, (count, *self.shape)).astype(self.dtype)


KINDS = {
    "vectors": Kind((6,), _OF_ANY),
    "series": Kind((STEPS, 4), _OF_SERIES),
    "tokens": Kind((STEPS,), _OF_SERIES, "int32"),
    "pictures": Kind((6, 6, 3), (*_OF_ANY, "pictured", "pooled")),
}
