"""Small models that compose layers as people do."""

from collections.abc import Callable
from typing import Any

import keras
import numpy as np

from tests.matrix.cases.classifier import CLASSES, Rng, adam, labels, reals, weights
from tests.matrix.parity import Case

L, ops = keras.layers, keras.ops
TOKENS, STEPS = 12, 6
Batch = Callable[[Rng, int], tuple[Any, ...]]


def case(name: str, build: Callable[[], Any], batch: Batch, **compile_with: Any) -> Case:
    def compiled() -> Any:
        model = build()
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(
            **{"optimizer": adam(), "loss": loss, "metrics": ["accuracy"], **compile_with}
        )
        return model

    return Case(name, compiled, batch, rows=(5, 4, 5, 1))


def pictures(rng: Rng, rows: int) -> tuple[Any, ...]:
    return reals(rng, rows, 8, 8, 3), labels(rng, rows), weights(rng, rows)


def sentences(rng: Rng, rows: int) -> tuple[Any, ...]:
    return _tokens(rng, rows), labels(rng, rows)


def _tokens(rng: Rng, rows: int) -> np.ndarray:
    found = rng.integers(1, TOKENS, (rows, STEPS))
    for row in range(rows):
        found[row, 3 + row % STEPS :] = 0
    return found


def next_tokens(rng: Rng, rows: int) -> tuple[Any, ...]:
    found = rng.integers(1, TOKENS, (rows, STEPS + 1))
    return found[:, :-1], found[:, 1:]


def series(rng: Rng, rows: int) -> tuple[Any, ...]:
    return reals(rng, rows, STEPS, 4), labels(rng, rows)


def rows_of(*sizes: int) -> Batch:
    def batch(rng: Rng, rows: int) -> tuple[Any, ...]:
        x = tuple(reals(rng, rows, size) for size in sizes)
        return (x if len(x) > 1 else x[0]), labels(rng, rows)

    return batch


def residual_cnn() -> Any:
    x = keras.Input((8, 8, 3))
    # 16 channels: with fewer, oneDNN writes past its memory in the gradient of `short` (6035).
    h = L.Conv2D(16, 3, padding="same", use_bias=False)(x)
    h = L.ReLU()(L.BatchNormalization(momentum=0.5)(h))
    short = L.Conv2D(8, 1, strides=2)(h)
    h = L.SeparableConv2D(8, 3, strides=2, padding="same", activation="relu")(h)
    h = L.ReLU()(L.Add()([short, L.BatchNormalization(momentum=0.5)(h)]))
    return keras.Model(x, L.Dense(CLASSES)(L.Dropout(0.2)(L.GlobalAveragePooling2D()(h))))


def _block(h: Any, causal: bool) -> Any:
    attended = L.MultiHeadAttention(2, 4, dropout=0.1)(h, h, use_causal_mask=causal)
    h = L.LayerNormalization()(h + attended)
    return L.LayerNormalization()(h + L.Dense(8)(L.Dense(16, activation="gelu")(h)))


def encoder() -> Any:
    x = keras.Input((STEPS,), dtype="int32")
    h = L.Embedding(TOKENS, 8, mask_zero=True)(x)
    return keras.Model(x, L.Dense(CLASSES)(L.GlobalAveragePooling1D()(_block(h, causal=False))))


def decoder() -> Any:
    x = keras.Input((STEPS,), dtype="int32")
    table = L.ReversibleEmbedding(TOKENS, 8)
    h = L.RMSNormalization()(table(x))
    return keras.Model(x, table(_block(h, causal=True), reverse=True))


def recurrent() -> Any:
    x = keras.Input((STEPS, 4))
    h = L.GRU(8, return_sequences=True, dropout=0.1)(x)
    h = L.Bidirectional(L.LSTM(6, return_sequences=True))(h)
    return keras.Model(x, L.Dense(CLASSES)(L.GRU(5)(h)))


class Sampling(L.Layer):
    def __init__(self):
        super().__init__()
        self.seed_generator = keras.random.SeedGenerator(5)

    def call(self, inputs):
        mean, log_variance = inputs
        divergence = ops.exp(log_variance) + ops.square(mean) - 1 - log_variance
        self.add_loss(0.01 * ops.mean(ops.sum(divergence, axis=-1)))
        noise = keras.random.normal(ops.shape(mean), seed=self.seed_generator)
        return mean + ops.exp(0.5 * log_variance) * noise


def autoencoder() -> Any:
    x = keras.Input((8,))
    h = L.Dense(6, activation="relu")(x)
    z = Sampling()([L.Dense(4)(h), L.Dense(4)(h)])
    return keras.Model(x, L.Dense(8)(L.Dense(6, activation="relu")(z)))


class Subclassed(keras.Model):
    def __init__(self):
        super().__init__()
        self.blocks = [L.Dense(8, activation="tanh") for _ in range(2)]
        self.normalization = L.BatchNormalization(momentum=0.5)
        self.head = L.Dense(CLASSES)

    def call(self, x, training=False):
        for block in self.blocks:
            x = block(x)
        return self.head(self.normalization(x, training=training))


class OwnStep(Subclassed):
    """Its own loss, from a sharded value that the host reads."""

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        loss = super().compute_loss(x, y, y_pred, sample_weight, training)
        return loss * 2 if float(ops.mean(x)) > 0 else loss + ops.sum(ops.square(y_pred)) * 0.01


def shared() -> Any:
    layer, x, y = L.Dense(6, activation="tanh"), keras.Input((6,)), keras.Input((6,))
    return keras.Model([x, y], L.Dense(CLASSES)(L.Concatenate()([layer(layer(x)), layer(y)])))


def frozen() -> Any:
    x = keras.Input((6,))
    first, normalization = L.Dense(8), L.BatchNormalization(momentum=0.5)
    h = L.Dense(8, activation="tanh")(normalization(first(x)))
    first.trainable = normalization.trainable = False
    return keras.Model(x, L.Dense(CLASSES)(h))


def several() -> Any:
    x, y = keras.Input((6,), name="x"), keras.Input((4,), name="y")
    h = L.Dense(8, activation="tanh")(L.Concatenate()([x, y]))
    return keras.Model({"x": x, "y": y}, {"a": L.Dense(CLASSES)(h), "b": L.Dense(2)(h)})


def named(rng: Rng, rows: int) -> tuple[Any, ...]:
    x = {"x": reals(rng, rows, 6), "y": reals(rng, rows, 4)}
    return x, {"a": labels(rng, rows), "b": reals(rng, rows, 2)}


def lora() -> Any:
    x = keras.Input((6,))
    layers = [L.Dense(8, activation="tanh"), L.Dense(CLASSES)]
    model = keras.Model(x, layers[1](layers[0](x)))
    for layer in layers:
        layer.enable_lora(2)
    return model


def same(batch: Batch) -> Batch:
    """Targets that are the inputs."""
    return lambda rng, rows: (batch(rng, rows)[0],) * 2


MODELS = [
    case("residual CNN", residual_cnn, pictures),
    case("encoder", encoder, sentences),
    case("decoder", decoder, next_tokens),
    case("recurrent stack", recurrent, series),
    case("autoencoder", autoencoder, same(rows_of(8)), loss="mse", metrics=["mae"]),
    case("subclassed", Subclassed, rows_of(6)),
    case("own loss", OwnStep, rows_of(6)),
    case("shared layers", shared, rows_of(6, 6)),
    case("frozen layers", frozen, rows_of(6)),
    case("LoRA", lora, rows_of(6)),
    case("several inputs and outputs", several, named,
         loss={"a": keras.losses.SparseCategoricalCrossentropy(from_logits=True), "b": "mse"},
         loss_weights={"a": 1.0, "b": 0.5}, metrics={"a": ["accuracy"], "b": ["mae"]}),
]  # fmt: skip
