"""Models whose captured steps are tested, and what their steps compute and say."""

import contextlib
import inspect
import logging
import sys

import keras
import numpy as np
import torch

import shardcore
from tests.distributed.interpreter_events import follow
from tests.distributed.programs import IS_ON_GPU, distribute

ROWS, STEPS = 8, 7
calls = []  # of the Python of a model, which a captured step does not run
CALLED = "shardcore.tests.called"
CALL = inspect.unwrap(keras.Layer.__call__).__code__


def is_real(x):
    """Returns whether Keras computes, and does not infer shapes."""
    return isinstance(x, torch.Tensor) and not x.is_meta


class Spy(keras.layers.Layer):
    """Notes that its Python was run, where no trace shows it."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        follow(CALLED, calls)
        self.factors = [1.0, 1.0]

    def call(self, x):
        if is_real(x):
            sys.audit(CALLED, self.name)
        return x * self.factors[0] if self.factors[0] != 1.0 else x


def mlp():
    x = keras.Input((6,))
    h = keras.layers.Dense(8, activation="relu", name="first", kernel_regularizer="l2")(Spy()(x))
    h = keras.layers.Dropout(0.4, seed=5)(keras.layers.Dropout(0.2)(h))
    return keras.Model(x, keras.layers.Dense(4, name="head")(h))


def cnn():
    x = keras.Input((6, 6, 2))
    h = keras.layers.BatchNormalization()(keras.layers.Conv2D(4, 3)(Spy()(x)))
    h = keras.layers.Flatten()(keras.layers.MaxPooling2D()(keras.layers.ReLU()(h)))
    return keras.Model(x, keras.layers.Dense(4, name="head")(h))


def decoder():
    x = keras.Input((5,), dtype="int32")
    h = Spy()(keras.layers.Embedding(12, 8)(x))
    h += keras.layers.MultiHeadAttention(2, 4, name="attention")(h, h, use_causal_mask=True)
    h = keras.layers.LayerNormalization()(h)
    return keras.Model(x, keras.layers.Dense(4, name="head")(h[:, -1]))


def lstm():
    x = keras.Input((4, 3))
    return keras.Model(x, keras.layers.Dense(4, name="head")(keras.layers.LSTM(6)(Spy()(x))))


def plain_mlp():
    x = keras.Input((6,))
    h = keras.layers.Dense(8, activation="gelu", name="first")(Spy()(x))
    h = keras.layers.Dropout(0.2, seed=5)(keras.layers.Dropout(0.2)(h))
    return keras.Model(x, keras.layers.Dense(4, name="head")(h))


def scaled():
    """Tensors are constants of its graph, as Gemma and T5 of keras-hub have them."""
    x = keras.Input((6,))
    h = Spy()(x) * keras.ops.cast(keras.ops.sqrt(64.0), "float32")
    h = keras.ops.clip(keras.layers.Dense(8, name="first")(h), -1.0, x_max=torch.tensor(3.0))
    return keras.Model(x, keras.layers.Dense(4, name="head")(h))


SHAPES = {mlp: (6,), scaled: (6,), plain_mlp: (6,), cnn: (6, 6, 2), decoder: (5,), lstm: (4, 3)}
RULES = {
    "first/kernel": (None, "model"),
    "first/bias": ("model",),
    "attention/(query|key|value)/kernel": (None, "model", None),
    "attention/output/kernel": ("model", None, None),
    "head/kernel": ("model", None),
}


def batches(build, steps=STEPS):
    rng = np.random.default_rng(3)
    draw = rng.normal if build is not decoder else lambda size: rng.integers(0, 12, size)
    return [
        (draw(size=(ROWS, *SHAPES[build])).astype("float32"), rng.integers(0, 4, ROWS))
        for _ in range(steps)
    ]


def compiled(build, jit_compile, optimizer="adam"):
    keras.utils.set_random_seed(7)
    model = build()
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer, loss, metrics=["accuracy"], jit_compile=jit_compile)
    return model


def trained(model, data):
    """All that `model` computes and keeps, and how often its Python ran."""
    calls.clear()
    found = [model.train_on_batch(x, y) for x, y in data]
    runs = len(calls)
    found += [model.test_on_batch(*data[0]) for _ in range(5)]
    found += [model.predict_on_batch(data[0][0]) for _ in range(5)]
    return [*map(np.asarray, found), *state(model)], runs


def state(model):
    return [keras.ops.convert_to_numpy(v) for v in [*model.variables, *model.optimizer.variables]]


def assert_equal(found, expected):
    """The numbers are the same; on a GPU all but the last digits."""
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        if IS_ON_GPU:
            np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)
        else:
            np.testing.assert_array_equal(one, other)


@contextlib.contextmanager
def layer_calls():
    """Gives a list of the layers of Keras that are called meanwhile; a captured step calls none."""
    called = []

    def note(frame, event, _):
        if event == "call" and frame.f_code is CALL:
            called.append(frame.f_locals["self"].name)

    sys.setprofile(note)  # captured steps run under a profiler too
    try:
        yield called
    finally:
        sys.setprofile(None)


def begin(shape):
    if shape is None:
        shardcore.install("single")
    else:
        distribute(shape, RULES)


def messages(level=logging.WARNING):
    """The messages about capture from now on."""
    said = []
    handler = logging.Handler(level)
    handler.emit = lambda record: said.append(record.getMessage())
    logger = logging.getLogger("shardcore.capture")
    logger.setLevel(level)
    logger.addHandler(handler)
    return said


def reasons(build, jit="auto", steps=4, shape=None, model_class=None):
    """The messages about steps that are not captured."""
    begin(shape)
    said = messages()
    keras.utils.set_random_seed(1)
    x = keras.Input((4,))
    model = (model_class or keras.Model)(x, keras.layers.Dense(1)(build()(x)))
    model.compile("sgd", "mse", jit_compile=jit)
    calls.clear()
    for _ in range(steps):
        model.train_on_batch(np.ones((4, 4), "float32"), np.ones((4, 1), "float32"))
    return said, len(calls)
