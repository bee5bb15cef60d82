"""Quantizing a sharded model: the codes and scales of one device, still sharded by their rules."""

import gc

import keras
import numpy as np
import pytest
from keras import layers

import shardcore
from shardcore.testing import run_ranks
from tests.distributed.programs import assert_close, distribute, local, placements

RANDOM = np.random.default_rng(0)
TOKENS = RANDOM.integers(0, 10, size=(6, 3))
ROWS = RANDOM.normal(size=(6, 8)).astype("float32")

RULES = {
    "table/embeddings": ("model", None),
    "mha/(query|key|value)/kernel": (None, "model", None),
    "mha/attention_output/kernel": ("model", None, None),
    "heads/kernel": (None, "model", None),
    "up/kernel": (None, "model"),
    "down/kernel": ("model", None),
}


def transformer():
    keras.utils.set_random_seed(1)
    tokens = keras.Input((3,), dtype="int64")
    x = layers.Embedding(10, 8, name="table")(tokens)
    x = layers.MultiHeadAttention(2, 4, name="mha")(x, x)
    x = layers.EinsumDense("abc,cde->abde", (None, 2, 6), name="heads")(x)
    x = layers.Reshape((3, 12))(x)
    x = layers.Dense(7, "gelu", name="up")(x)  # the packed kernel has 4 columns
    return keras.Model(tokens, layers.Dense(4, name="down")(x))


# What Keras says of a layer that it does not quantize: 3.15, 3.16.
SKIPPED = "does not have a `quantize` method|do not support quantization"


def quantized(model, mode):
    """Everything that the model keeps and what it predicts, once it is quantized."""
    gc.freeze()  # Keras collects garbage for each layer: not all that the rank was forked with
    with pytest.warns(UserWarning, match=SKIPPED):
        model.quantize(mode)
    results = {f"{n} {v.path}": v.numpy() for n, v in enumerate(model.variables)}
    return results | {"predictions": model.predict(TOKENS, batch_size=4, verbose=0)}


@pytest.mark.parametrize("mode", ["int8", "int4"])
def test_a_sharded_model_is_quantized_as_on_one_device(mode, tmp_path):
    file = str(tmp_path / "m.weights.h5")

    def program(rank):
        plain = transformer()
        one_device = quantized(plain, mode)
        scale = ("model",) if mode == "int8" else (None, "model")  # int4 has one row per group
        distribute((1, 2), {**RULES, "up/kernel_scale": scale})
        model = transformer()
        results = quantized(model, mode)
        assert shardcore.rules_report(model).unused_rules == ()
        assert shardcore.verify(model).ok
        model.save_weights(file)
        placed = {v.path: (placements(v._value), local(v).shape) for v in model.variables}
        keras.distribution.set_distribution(None)
        for variable in plain.variables:
            variable.assign(keras.ops.zeros_like(variable))
        plain.load_weights(file)
        return one_device, results, plain.predict(TOKENS, verbose=0), placed

    for rank, (one_device, results, loaded, placed) in enumerate(run_ranks(program, 2)):
        codes = [name for name in one_device if one_device[name].dtype == np.int8]
        assert len(codes) >= 8
        for name in codes:
            np.testing.assert_array_equal(results[name], one_device[name], err_msg=name)
        assert_close([results], one_device)
        np.testing.assert_allclose(loaded, one_device["predictions"], atol=1e-5)
        assert placed["up/kernel"] == ("R S(1)", (12, (4, 3)[rank] if mode == "int8" else 2))
        assert placed["down/kernel"][0] == placed["table/embeddings"][0] == "R S(0)"
        assert placed["mha/query/kernel"][0] == "R S(1)"
        # Heads are reduced here. An int4 kernel is a matrix of rows, which are, and columns.
        assert placed["mha/attention_output/kernel"][0] == "R S(0)"


def pair():
    keras.utils.set_random_seed(1)
    x = keras.Input((8,))
    up = layers.Dense(12, use_bias=False, name="up")(x)
    return keras.Model(x, layers.Dense(8, use_bias=False, name="down")(up))


@pytest.mark.filterwarnings("ignore:Found a non-scalar tensor with numel=1")  # torch's, once
@pytest.mark.filterwarnings(f"ignore:.*({SKIPPED})")
@pytest.mark.parametrize("mesh", [(1, 2), (2, 1)])
def test_float8_trains_as_on_one_device(mesh):
    def program(rank):
        one_device = trained(pair())
        distribute(mesh, {"up/kernel": (None, "model"), "down/kernel": ("model", None)})
        return one_device, trained(pair())

    def trained(model):
        model.quantize("float8")
        model.compile(keras.optimizers.Adam(0.05, epsilon=1e-2), "mse", jit_compile=False)
        losses = [float(model.train_on_batch(ROWS, ROWS)) for _ in range(4)]
        results = {f"{n} {v.path}": v.numpy() for n, v in enumerate(model.variables)}
        return results | {"losses": np.array(losses)}

    for one_device, results in run_ranks(program, 2):
        histories = [name for name in one_device if "amax_history" in name]
        assert len(histories) == 6
        assert all(one_device[name].any() for name in histories)
        assert_close([results], one_device)
