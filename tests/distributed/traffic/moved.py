"""Helpers for the tests of moved bytes: small models, counted steps, steps on one device."""

import keras
import numpy as np
from keras import layers

import shardcore
from shardcore.testing import count_collectives
from tests.distributed.models import CASES, RNG, cnn, decoder, mlp
from tests.distributed.programs import AXES, STRATEGY

IS_3_13 = keras.__version__.startswith("3.13.")
VOCABULARY, LENGTH, WIDTH, BATCH = 64, 6, 16, 8
TOKENS = RNG.integers(0, VOCABULARY, (BATCH, LENGTH))


def lstm():
    return keras.Sequential(
        [
            keras.Input((5, 6)),
            layers.LSTM(8, return_sequences=True),
            layers.LSTM(4),
            layers.Dense(7),
        ]
    )


DATA = {
    mlp: CASES[mlp],
    cnn: CASES[cnn],
    decoder: CASES[decoder],
    lstm: (RNG.normal(size=(8, 5, 6)).astype("float32"), RNG.normal(size=(8, 7))),
}


def transformer(blocks, attention="heads", dropout=0.0):
    """A decoder of so many blocks, with a final norm and a head over the vocabulary."""
    tokens = keras.Input((LENGTH,), dtype="int32")
    h = layers.Embedding(VOCABULARY, WIDTH, name="tokens")(tokens)
    for n in range(blocks):
        g = layers.LayerNormalization(name=f"block_{n}_norm_1")(h)
        if attention == "groups":
            attend = layers.GroupQueryAttention(4, 8, 4, dropout=dropout, name=f"block_{n}_attend")
        else:
            attend = layers.MultiHeadAttention(4, 4, dropout=dropout, name=f"block_{n}_attend")
        h = h + layers.Dropout(dropout)(attend(g, g, use_causal_mask=True))
        g = layers.LayerNormalization(name=f"block_{n}_norm_2")(h)
        g = layers.Dense(64, activation="gelu", name=f"block_{n}_up")(g)
        h = h + layers.Dropout(dropout)(layers.Dense(WIDTH, name=f"block_{n}_down")(g))
    h = layers.LayerNormalization(name="final_norm")(h)
    return keras.Model(tokens, layers.Dense(VOCABULARY, name="logits")(h))


def distribute(build, mesh, rules=None, policy=None, strategy=STRATEGY, **options):
    """Sets the distribution of `rules`, or of a policy's plan for what `build` makes."""
    shardcore.install(strategy)
    device_mesh = keras.distribution.DeviceMesh(mesh, AXES)
    layout_map = (
        shardcore.plan(build, device_mesh, policy, **options)
        if policy
        else keras.distribution.LayoutMap(device_mesh)
    )
    for path, spec in (rules or {}).items():
        layout_map[path] = spec
    keras.distribution.set_distribution(
        keras.distribution.ModelParallel(layout_map=layout_map, batch_dim_name="data")
    )


def compiled(build, classes=False, metrics=None, **options):
    keras.utils.set_random_seed(1)
    model = build()
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    optimizer = keras.optimizers.SGD(0.1, momentum=0.9)
    model.compile(optimizer, loss if classes else "mse", metrics=metrics, **options)
    return model


def trained_shapes(build):
    """The shapes of the variables that train. They are made on the CPU, as this process forks."""
    with keras.device("cpu"):
        return [tuple(each.shape) for each in compiled(build).trainable_variables]


def numbers(model, logs):
    values = {v.path: v.numpy() for v in model.variables}
    return values | {f"log {name}": np.array(value) for name, value in logs.items()}


def trained(build, data, **options):
    """Two eager steps: the numbers, and what the second one moves."""
    model = compiled(build, classes=data[1].dtype.kind == "i", jit_compile=False, **options)
    model.train_on_batch(*data, return_dict=True)
    with count_collectives() as traffic:
        logs = model.train_on_batch(*data, return_dict=True)
    return numbers(model, logs), dict(traffic.calls), dict(traffic.operand_bytes)


def trainable(values, model_variables):
    """The bytes of the variables of those names."""
    return sum(values[name].nbytes for name in model_variables)


def assert_same(found, expected, what):
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_allclose(
            found[name], value, rtol=1e-4, atol=1e-5, err_msg=f"{what}: {name}"
        )
