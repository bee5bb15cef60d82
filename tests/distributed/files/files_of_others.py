"""A model whose weights have the dtypes and shapes of files of others."""

import keras
import numpy as np
import torch

import shardcore

KEYS = {
    "words/embeddings": "embed.weight",
    "query/kernel": ("q_proj.weight", "(h d) m -> m h d"),
    "query/bias": ("q_proj.bias", "(h d) -> h d"),
    "out/kernel": ("o_proj.weight", "o i -> i o"),
    "out/bias": "o_proj.bias",
}
RULES = {
    "words/embeddings": ("model", None),
    "query/kernel": (None, "model", None),
    "query/bias": ("model", None),
    "out/kernel": ("model", "data"),
}
SMALL_TYPES = ("bfloat16", "float16", "float8_e4m3fn", "float8_e5m2", "int8", "int32", "bool")


def distribute(shape, strategy="dtensor", rules=None):
    shardcore.install(strategy)
    mesh = keras.distribution.DeviceMesh(shape, ("data", "model"))
    layout_map = keras.distribution.LayoutMap(mesh)
    for key, spec in (RULES if rules is None else rules).items():
        layout_map[f".*{key}"] = spec
    keras.distribution.set_distribution(
        keras.distribution.ModelParallel(layout_map=layout_map, batch_dim_name="data")
    )


def build(dtype="float32"):
    tokens = keras.Input((3,), dtype="int32")
    x = keras.layers.Embedding(8, 6, name="words", dtype=dtype)(tokens)
    x = keras.layers.EinsumDense(
        "btm,mhd->bthd", (3, 4, 2), bias_axes="hd", name="query", dtype=dtype
    )(x)
    x = keras.layers.Reshape((3, 8))(x)
    return keras.Model(tokens, keras.layers.Dense(6, name="out", dtype=dtype)(x), name="net")


def tensors():
    """Returns what a file of Transformers has for the model, and the values of the weights."""
    rng = np.random.default_rng(1)
    files = {
        "embed.weight": rng.normal(size=(8, 6)),
        "q_proj.weight": rng.normal(size=(8, 6)),
        "q_proj.bias": rng.normal(size=8),
        "o_proj.weight": rng.normal(size=(6, 8)),
        "o_proj.bias": rng.normal(size=6),
    }
    files = {key: value.astype("float32") for key, value in files.items()}
    weights = [
        files["embed.weight"],
        files["q_proj.weight"].T.reshape(6, 4, 2),
        files["q_proj.bias"].reshape(4, 2),
        files["o_proj.weight"].T,
        files["o_proj.bias"],
    ]
    return files, weights


class OfSmallTypes(keras.layers.Layer):
    def build(self, _shape):
        for name in SMALL_TYPES:
            self.add_weight(
                shape=(4, 6), dtype=name, name=name, initializer="zeros", trainable=False
            )


def build_small():
    layer = OfSmallTypes(name="small")
    model = keras.Sequential([keras.Input((2,)), layer], name="net")
    return model


def small_values():
    """Returns random bytes, as each dtype has them."""
    rng = np.random.default_rng(2)
    values = {}
    for name in SMALL_TYPES:
        dtype = getattr(torch, name)
        data = rng.integers(0, 2 if name == "bool" else 256, (4, 6 * dtype.itemsize), np.uint8)
        values[name] = torch.from_numpy(data).view(dtype)
    return values


def bits_of(model):
    """The bytes of each full weight, on all ranks."""
    found = {}
    for variable in model.weights:
        value = variable.value
        full = value.full_tensor() if hasattr(value, "full_tensor") else value
        found[variable.path] = full.detach().contiguous().view(torch.uint8).numpy().tobytes()
    return found
