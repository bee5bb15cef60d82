"""Models of layers that are drawn at random: combinations that no test by hand has."""

import random
from collections.abc import Callable
from typing import Any

import keras

from tests.matrix.cases.classifier import CLASSES
from tests.matrix.cases.models import TOKENS, Batch, pictures, rows_of, sentences, series
from tests.matrix.parity import Case

L = keras.layers
Draw = random.Random
Block = Callable[[Draw, Any], Any]
SIZES = (3, 4, 7, 8, 10)  # some are aligned in memory, some are sharded unevenly
ACTIVATIONS = (None, "relu", "tanh", "gelu", "softmax")
OPTIONS: tuple[dict[str, Any], ...] = (
    {},
    {"clipnorm": 1.0},
    {"global_clipnorm": 1.0},
    {"gradient_accumulation_steps": 2},
    {"use_ema": True, "ema_overwrite_frequency": 3},
    {"weight_decay": 1e-3},
)
EACH = 8


def beside(layer: Callable[[int], Any]) -> Block:
    """A layer of as many features as there are, added to what it takes."""
    return lambda draw, x: L.Add()([x, layer(x.shape[-1])(x)])


def alone(layer: Callable[[], Any]) -> Block:
    return lambda draw, x: layer()(x)


def sized(layer: Callable[[int], Any]) -> Block:
    return lambda draw, x: layer(draw.choice(SIZES))(x)


def dense(draw: Draw, x: Any) -> Any:
    return L.Dense(draw.choice(SIZES), activation=draw.choice(ACTIVATIONS))(x)


def attention(layer: Callable[[], Any]) -> Block:
    return lambda draw, x: L.Add()([x, layer()(x, x, use_causal_mask=draw.random() < 0.5)])


OF_ANY: tuple[Block, ...] = (
    dense,
    beside(L.Dense),
    beside(lambda size: L.Dense(size, activation="sigmoid", kernel_regularizer="l2")),
    alone(L.LayerNormalization),
    alone(L.RMSNormalization),
    alone(lambda: L.BatchNormalization(momentum=0.5)),
    alone(lambda: L.Dropout(0.3, seed=3)),
    lambda draw, x: L.Concatenate()([x, L.Dense(3)(x)]),
)
VECTORS = (*OF_ANY, alone(L.PReLU), lambda draw, x: L.Multiply()([x, L.Dense(x.shape[-1])(x)]))
SERIES = (
    *OF_ANY,
    attention(lambda: L.MultiHeadAttention(2, 4)),
    attention(lambda: L.GroupQueryAttention(4, 4, 2)),
    sized(lambda size: L.LSTM(size, return_sequences=True)),
    sized(lambda size: L.GRU(size, return_sequences=True)),
    sized(lambda size: L.Conv1D(size, 3, padding="causal")),
    sized(lambda size: L.TimeDistributed(L.Dense(size))),
    sized(lambda size: L.Bidirectional(L.SimpleRNN(size, return_sequences=True))),
    alone(lambda: L.AveragePooling1D(2, 1, padding="same")),
)
PICTURES = (
    *OF_ANY,
    sized(lambda size: L.Conv2D(size, 3, padding="same", activation="relu")),
    sized(lambda size: L.Conv2D(size, 3, 2, padding="same")),
    sized(lambda size: L.SeparableConv2D(size, 3, padding="same")),
    sized(lambda size: L.Conv2DTranspose(size, 3, padding="same")),
    alone(lambda: L.DepthwiseConv2D(3, padding="same")),
    alone(lambda: L.MaxPooling2D(2, padding="same")),
    alone(lambda: L.SpatialDropout2D(0.2, seed=3)),
)
# By kind: its input, the blocks, how it ends, and its batches.
KINDS: dict[str, tuple[Callable[[], Any], tuple[Block, ...], tuple[Any, ...], Batch]] = {
    "vectors": (lambda: keras.Input((6,)), VECTORS, (L.Identity,), rows_of(6)),
    "series": (
        lambda: keras.Input((6, 4)),
        SERIES,
        (L.Flatten, L.GlobalAveragePooling1D, L.GlobalMaxPooling1D, lambda: L.GRU(5)),
        series,
    ),
    "tokens": (lambda: keras.Input((6,), dtype="int32"), SERIES, (lambda: L.LSTM(5),), sentences),
    "pictures": (
        lambda: keras.Input((8, 8, 3)),
        PICTURES,
        (L.Flatten, L.GlobalAveragePooling2D),
        pictures,
    ),
}


def drawn(kind: str, seed: int) -> Any:
    """A model of that kind: one seed, one model."""
    draw = Draw(f"{kind} {seed}")
    made, blocks, endings, _ = KINDS[kind]
    x = h = made()
    if kind == "tokens":
        h = L.Embedding(TOKENS, draw.choice(SIZES), mask_zero=draw.random() < 0.5)(h)
    for _ in range(draw.randint(2, 5)):
        h = draw.choice(blocks)(draw, h)
    return keras.Model(x, L.Dense(CLASSES)(draw.choice(endings)()(h)))


def drawn_case(kind: str, seed: int) -> Case:
    """A drawn model, trained by Adam with an option that is drawn too."""

    def compiled() -> Any:
        model = drawn(kind, seed)
        options = Draw(f"optimizer of {kind} {seed}").choice(OPTIONS)
        model.compile(
            keras.optimizers.Adam(0.01, epsilon=1e-3, **options),
            keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            metrics=["accuracy"],
        )
        return model

    return Case(f"{kind}/{seed}", compiled, KINDS[kind][3], rows=(5, 4, 5, 1))


DRAWN = [drawn_case(kind, seed) for kind in KINDS for seed in range(EACH)]
