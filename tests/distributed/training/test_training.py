"""A model trains over a mesh to the numbers of one device: the same program, with and without."""

import math
from functools import cache

import keras
import numpy as np
import pytest

from shardcore.binding.keras_private.lines import LINE
from shardcore.testing import run_ranks
from tests.distributed.programs import as_arrays, assert_close, distribute, local_shapes

RNG = np.random.default_rng(0)
ROWS, CLASSES = 22, 4


def mlp():
    x = keras.Input((12,))
    h = keras.layers.Dense(16, activation="relu", name="first")(x)
    h = keras.layers.Dropout(0.3)(h)
    h = keras.layers.Dense(12, name="second")(h)
    h = keras.layers.LayerNormalization()(h)
    return keras.Model(x, keras.layers.Dense(CLASSES, name="head")(h))


def cnn():
    x = keras.Input((8, 8, 3))
    h = keras.layers.Conv2D(4, 3, padding="same", use_bias=False)(x)
    h = keras.layers.BatchNormalization()(h)
    h = keras.layers.MaxPooling2D()(keras.layers.ReLU()(h))
    h = keras.layers.Conv2D(4, 3, activation="relu")(h)
    return keras.Model(x, keras.layers.Dense(CLASSES, name="head")(keras.layers.Flatten()(h)))


def decoder():
    x = keras.Input((6,), dtype="int32")
    h = keras.layers.Embedding(20, 8, name="embedding")(x)
    attended = keras.layers.MultiHeadAttention(4, 3, name="attention")(h, h, use_causal_mask=True)
    h = keras.layers.LayerNormalization()(h + attended)
    h = h + keras.layers.Dense(8, name="second")(
        keras.layers.Dense(16, activation="gelu", name="first")(h)
    )
    h = keras.layers.GlobalAveragePooling1D()(h)
    return keras.Model(x, keras.layers.Dense(CLASSES, name="head")(h))


def gru():
    x = keras.Input((3, 3))
    h = keras.layers.GRU(8, name="recurrent", dropout=0.1)(x)
    return keras.Model(x, keras.layers.Dense(CLASSES, name="head")(h))


def reals(*shape):
    return RNG.normal(size=(ROWS, *shape)).astype("float32")


COLUMNS = {"first/kernel": (None, "model"), "first/bias": ("model",)}
ROW = {"second/kernel": ("model", None)}
HEAD = {"head/kernel": ("model", None)}
MODELS = {
    mlp: (reals(12), COLUMNS | ROW | HEAD),
    cnn: (reals(8, 8, 3), HEAD),
    decoder: (
        RNG.integers(0, 20, (ROWS, 6)).astype("int32"),
        COLUMNS
        | ROW
        | {
            "embedding/embeddings": ("model", None),
            "attention/(query|key|value)/kernel": (None, "model", None),
            "attention/(query|key|value)/bias": ("model", None),
            "attention/attention_output/kernel": ("model", None, None),
        },
    ),
    gru: (reals(3, 3), HEAD | {"recurrent/gru_cell/kernel": (None, "model")}),
}
TARGETS = keras.utils.to_categorical(RNG.integers(0, CLASSES, ROWS), CLASSES)
WEIGHTS = RNG.uniform(0.5, 1.5, ROWS).astype("float32")
OPTIMIZERS = {
    "sgd": lambda: keras.optimizers.SGD(0.1, momentum=0.9),
    # A large epsilon: gradients that are zero in theory are noise, which Adam would make steps of.
    "adam": lambda: keras.optimizers.Adam(0.01, epsilon=1e-3),
}


def train(rank, build, optimizer, mesh, jit_compile):
    """All of the trainer on one model: steps of 8, 8 and 6 rows, and of 1, less than the mesh."""
    x, rules = MODELS[build]
    if mesh:
        distribute(mesh, rules)
    keras.utils.set_random_seed(1)
    model = build()
    model.compile(
        OPTIMIZERS[optimizer](),
        keras.losses.CategoricalCrossentropy(from_logits=True),
        metrics=["accuracy", keras.metrics.AUC(20, from_logits=True, name="auc")],
        weighted_metrics=[keras.metrics.MeanSquaredError(name="mse")],
        jit_compile=jit_compile,
    )
    history = model.fit(
        x, TARGETS, batch_size=8, epochs=2, sample_weight=WEIGHTS, verbose=0,
        validation_data=(x[:6], TARGETS[:6], WEIGHTS[:6]),
    ).history  # fmt: skip
    values = {f"history of {name}": value for name, value in history.items()}
    values["evaluate"] = model.evaluate(x, TARGETS, 8, sample_weight=WEIGHTS, verbose=0)
    values["predict"] = model.predict(x, 8, verbose=0)
    values["train_on_batch"] = model.train_on_batch(x[:6], TARGETS[:6], WEIGHTS[:6])
    values["one row"] = model.train_on_batch(x[:1], TARGETS[:1])
    values["test_on_batch"] = model.test_on_batch(x[:6], TARGETS[:6])
    values["predict_on_batch"] = model.predict_on_batch(x[:6])
    weights = zip(model.weights, model.get_weights(), strict=True)
    values |= {f"weight {variable.path}": value for variable, value in weights}
    slots = [v for v in model.optimizer.variables if v.shape]
    values |= {f"slot {slot.path}": slot.numpy() for slot in slots}
    return values, local_shapes([*model.weights, *slots]) if mesh else None


@cache
def one_device(build, optimizer):
    ((values, _),) = run_ranks(train, 1, build, optimizer, None, False)
    return values


# By model: its optimizer, and of some variables that the mesh shards the whole shape.
SHARDED = {
    mlp: ("sgd", {"first/kernel": (12, 16), "first/bias": (16,), "second/kernel": (16, 12)}),
    cnn: ("sgd", {"head/kernel": (16, 4), "sgd/head_kernel_momentum": (16, 4)}),
    decoder: (
        "adam",
        {"attention/query/kernel": (8, 4, 3), "adam/embedding_embeddings_velocity": (20, 8)},
    ),
    gru: ("adam", {"recurrent/gru_cell/kernel": (3, 24), "head/kernel": (8, 4)}),
}
# Each axis alone, both, and four ranks along one: batch statistics of ranks without a row. The
# matrices have more models on more meshes. Two are captured, and two run eagerly.
CASES = [
    (mlp, (2, 1), "auto"),
    (cnn, (4, 1), False),
    (decoder, (2, 2), False),
    (gru, (1, 2), "auto"),
]


@pytest.mark.parametrize(
    ("build", "mesh", "jit_compile"),
    CASES,
    ids=[f"{build.__name__}-{d}x{m}" for build, (d, m), _ in CASES],
)
def test_the_numbers_are_those_of_one_device_on_every_rank(build, mesh, jit_compile):
    optimizer, sharded = SHARDED[build]
    reference = one_device(build, optimizer)
    results = run_ranks(train, math.prod(mesh), build, optimizer, mesh, jit_compile, timeout=60)
    assert_close([values for values, _ in results], reference)
    for _, stored in results:
        found = {path.lower(): shape for path, shape in stored.items()}  # "SGD" in Keras 3.13
        for path, whole in sharded.items():
            assert math.prod(found[path]) * mesh[1] == math.prod(whole), path


def masked(activation="sigmoid"):
    """A model over sequences whose predictions carry a mask."""
    x = keras.Input((3, 4))
    h = keras.layers.Dense(8, activation="tanh", name="first")(keras.layers.Masking()(x))
    return keras.Model(x, keras.layers.Dense(1, activation=activation, name="second")(h))


SEQUENCES = reals(3, 4)
SEQUENCES[::2, 2] = 0
LABELS = RNG.integers(0, 2, (ROWS, 3, 1)).astype("float32")
WEIGHTS_OF_STEPS = RNG.uniform(0.5, 1.5, (ROWS, 3)).astype("float32")


class Detached(keras.losses.MeanSquaredError):
    """Hands its weights on without their gradient."""

    def __call__(self, y_true, y_pred, sample_weight=None):
        weights = keras.ops.convert_to_tensor(sample_weight).detach()
        return super().__call__(y_true, y_pred, weights)


def weigh(rank, mesh):
    """Sample weights under a mask, by which Keras multiplies tensors in place, arrays not."""
    if mesh:
        distribute(mesh, {"first/kernel": (None, "model")})
    values = {}
    # As an array, twice the same one; as a tensor, which `fit` makes of the array too.
    for name, weights in {"array": WEIGHTS_OF_STEPS, "tensor": WEIGHTS_OF_STEPS}.items():
        given = weights.copy() if name == "array" else keras.ops.convert_to_tensor(weights)
        keras.utils.set_random_seed(1)
        model = masked()
        model.compile("sgd", "mse", weighted_metrics=[keras.metrics.AUC(20), "accuracy"])
        first = slice(0, 7)
        values[f"{name} train"] = model.train_on_batch(
            SEQUENCES[first], LABELS[first], given[first]
        )
        if name == "array":
            values["array again"] = model.test_on_batch(SEQUENCES, LABELS, given)
            values["fit"] = model.fit(SEQUENCES, LABELS, 8, sample_weight=given, verbose=0).history[
                "auc"
            ]
            model.compile("sgd", Detached(), weighted_metrics=[keras.metrics.AUC(20)])
            values["detached"] = model.train_on_batch(SEQUENCES, LABELS, given)
        if mesh or name == "array":
            np.testing.assert_array_equal(
                as_arrays(given), weights
            )  # what the user gave is not written to
    return values


def test_weights_under_a_mask_count_as_on_one_device():
    (reference,) = run_ranks(weigh, 1, None)
    shows = abs(reference["array train"][1] - reference["tensor train"][1]) > 1e-3
    assert shows == (LINE < (3, 16))  # Keras 3.16 makes a tensor of an array before the step
    for mesh in [(2, 1), (1, 2)]:
        assert_close(run_ranks(weigh, 2, mesh), reference)


def fit_in_parts(rank, mesh):
    if mesh:
        distribute(mesh, MODELS[mlp][1])
    keras.utils.set_random_seed(1)
    model = mlp()
    model.compile("sgd", keras.losses.CategoricalCrossentropy(from_logits=True), metrics=["acc"])
    x, _ = MODELS[mlp]
    classes = {0: 0.5, 1: 2.0, 2: 1.0, 3: 1.5}
    options = {"batch_size": 4, "epochs": 4, "verbose": 0, "class_weight": classes}
    parts = {
        "split": model.fit(x, TARGETS, validation_split=0.3, initial_epoch=2, **options),
        "steps": model.fit(
            x, TARGETS, steps_per_epoch=2, validation_data=(x[:9], TARGETS[:9]),
            validation_steps=2, validation_freq=2, validation_batch_size=3, **options,
        ),
    }  # fmt: skip
    values = {
        f"{name} {key}": value for name, h in parts.items() for key, value in h.history.items()
    }
    values["epochs"] = parts["split"].epoch
    values["class weights"] = model.train_on_batch(x[:5], TARGETS[:5], class_weight=classes)
    return values | {f"weight {v.path}": v.numpy() for v in model.weights}


def test_the_options_of_fit_mean_what_they_mean_on_one_device():
    (reference,) = run_ranks(fit_in_parts, 1, None)
    assert_close(run_ranks(fit_in_parts, 2, (2, 1)), reference)
