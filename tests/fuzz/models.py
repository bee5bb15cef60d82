"""The model of a program: its head, loss, metrics, optimizer and training step."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import keras
import numpy as np
import torch

from tests.fuzz import layers

if TYPE_CHECKING:
    from tests.fuzz.programs import Program

L = keras.layers
CLASSES = 4
# By name: the loss, its metrics, and whether its targets are classes.
LOSSES: dict[str, tuple[Callable[[], Any], Callable[[], list[Any]], bool]] = {
    "mse": (lambda: "mse", lambda: ["mae"], False),
    "huber": (keras.losses.Huber, lambda: [keras.metrics.R2Score()], False),
    "classes": (
        lambda: keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        lambda: ["accuracy", keras.metrics.SparseTopKCategoricalAccuracy(2)],
        True,
    ),
    "summed": (
        lambda: keras.losses.MeanSquaredError(reduction="sum"),
        lambda: [keras.metrics.RootMeanSquaredError(), keras.metrics.CosineSimilarity()],
        False,
    ),
    "log_cosh": (lambda: "log_cosh", lambda: [], False),
}
# A large epsilon: a small one makes steps of a gradient that is noise, since it is zero in theory.
OPTIMIZERS: dict[str, Callable[..., Any]] = {
    "SGD": lambda **options: keras.optimizers.SGD(0.05, **options),
    "Adam": lambda **options: keras.optimizers.Adam(0.01, epsilon=1e-3, **options),
    "momentum": lambda **options: keras.optimizers.SGD(
        0.02, momentum=0.9, nesterov=True, **options
    ),
    "RMSprop": lambda **options: keras.optimizers.RMSprop(0.01, epsilon=1e-3, **options),
    "AdamW": lambda **options: keras.optimizers.AdamW(0.01, epsilon=1e-3, **options),
    "Adagrad": lambda **options: keras.optimizers.Adagrad(0.05, epsilon=1e-3, **options),
    "Nadam": lambda **options: keras.optimizers.Nadam(0.01, epsilon=1e-3, **options),
    "Adamax": lambda **options: keras.optimizers.Adamax(0.01, epsilon=1e-3, **options),
    "Adafactor": lambda **options: keras.optimizers.Adafactor(0.01, epsilon_1=1e-6, **options),
    "scheduled": lambda **options: keras.optimizers.Adam(
        keras.optimizers.schedules.CosineDecay(0.02, 20, warmup_target=0.03, warmup_steps=2),
        epsilon=1e-3,
        **options,
    ),
}
OPTIONS: dict[str, dict[str, Any]] = {
    "none": {},
    "clipnorm": {"clipnorm": 0.5},
    "clipvalue": {"clipvalue": 0.1},
    "global_clipnorm": {"global_clipnorm": 0.7},
    "accumulated": {"gradient_accumulation_steps": 2},
    "averaged": {"use_ema": True, "ema_momentum": 0.8, "ema_overwrite_frequency": 3},
    "decayed": {"weight_decay": 1e-2},
}


@keras.saving.register_keras_serializable("fuzz")
class OwnStep(keras.Model):
    """A model whose training step is that of Keras' guide for torch."""

    def train_step(self, data: Any) -> dict[str, Any]:
        x, y, weights = keras.utils.unpack_x_y_sample_weight(data)
        self.zero_grad()
        outputs = self(x, training=True)
        loss = self.compute_loss(x, y, outputs, weights)
        loss.backward()
        variables = list(self.trainable_weights)
        with torch.no_grad():
            self.optimizer.apply([variable.value.grad for variable in variables], variables)
        for metric in self.metrics:
            if metric.name == "loss":
                metric.update_state(loss)
            else:
                metric.update_state(y, outputs, sample_weight=weights)
        return {metric.name: metric.result() for metric in self.metrics}


@keras.saving.register_keras_serializable("fuzz")
class Scaled(OwnStep):
    """Changes gradients in place, and keeps a count of its steps in Python."""

    steps = 0

    def train_step(self, data: Any) -> dict[str, Any]:
        x, y, weights = keras.utils.unpack_x_y_sample_weight(data)
        loss = self.compute_loss(x, y, self(x, training=True), weights)
        variables = self.trainable_weights
        values = [variable.value for variable in variables]
        gradients = torch.autograd.grad(loss, values, materialize_grads=True)
        self.steps += 1
        with torch.no_grad():
            for gradient in gradients:
                gradient.mul_(0.5 if self.steps % 2 else 1.0)
            self.optimizer.apply(list(gradients), variables)
        return {"loss": loss.detach()}


STEPS: dict[str, type[Any]] = {"keras": keras.Model, "own": OwnStep, "scaled": Scaled}


def build(program: "Program") -> Any:
    """Returns the model of a program, not compiled."""
    kind = layers.KINDS[program.inputs]
    x = h = keras.Input(kind.shape, dtype=kind.dtype)
    if kind.dtype:
        h = L.Embedding(layers.TOKENS, 4, mask_zero=len(program.layers) % 2 == 0)(h)
    for layer in program.layers:
        h = layers.BUILDERS[layer.kind](h, layer.size, layer.variant)
    h = L.Flatten()(h) if len(program.layers) % 2 else _pooled(h)
    return STEPS[program.step](x, L.Dense(CLASSES, name="head")(h))


def _pooled(h: Any) -> Any:
    by_rank = {2: L.Identity, 3: L.GlobalAveragePooling1D, 4: L.GlobalMaxPooling2D}
    return by_rank[len(h.shape)]()(h)


def compile_model(model: Any, program: "Program", optimizer: str) -> None:
    """Compiles the model as the program says, with an optimizer of this name."""
    loss, metrics, _ = LOSSES[program.loss]
    model.compile(
        OPTIMIZERS[optimizer](**OPTIONS[program.option]),
        loss(),
        weighted_metrics=metrics() if program.weighted else None,
        metrics=None if program.weighted else metrics(),
        jit_compile=False if program.capture == "eager" else "auto",
    )


def data(program: "Program", draw: np.random.Generator, rows: int) -> tuple[Any, ...]:
    """Draws x, y and, if the program has them, weights of rows."""
    floatx = keras.config.floatx()
    x = layers.KINDS[program.inputs].rows(draw, rows)
    if LOSSES[program.loss][2]:
        y = draw.integers(0, CLASSES, (rows,))
    else:
        y = draw.normal(size=(rows, CLASSES)).astype(floatx)
    if not program.weighted:
        return x, y
    return x, y, draw.uniform(0.2, 2.0, rows).astype(floatx)
