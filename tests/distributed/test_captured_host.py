"""The Python of a captured step is as much for a model of many layers as for one of few."""

import sys

import keras
import numpy as np
import pytest

import shardcore
from shardcore.testing import run_ranks

FEW, MANY = 1, 4


def model_of(blocks):
    keras.utils.set_random_seed(0)
    inputs = x = keras.Input((8, 16))
    for _ in range(blocks):
        x = x + keras.layers.MultiHeadAttention(2, 8)(x, x)
        x = keras.layers.BatchNormalization()(x)
        x = keras.layers.Dropout(0.1)(keras.layers.Dense(16, activation="gelu")(x))
    model = keras.Model(inputs, keras.layers.Dense(4, name="head")(x))
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile("adam", loss, metrics=["accuracy"])
    return model


class Counted(keras.callbacks.Callback):
    """Counts the functions of Python that are called between the ends of batches."""

    def __init__(self):
        super().__init__()
        self.calls, self.at_ends = 0, []

    def __enter__(self):
        sys.setprofile(self._count)
        return self

    def __exit__(self, *error):
        sys.setprofile(None)

    def _count(self, frame, event, _function):
        self.calls += event == "call"

    def _end(self, batch, logs=None):
        self.at_ends.append(self.calls)

    on_train_batch_end = on_test_batch_end = on_predict_batch_end = _end

    @property
    def of_a_step(self):
        """Of the last step but one: after the last the loop of Keras ends."""
        return self.at_ends[-2] - self.at_ends[-3]


def functions_called(blocks, **compiled):
    """By method, how many functions of Python one of its steps calls."""
    model = model_of(blocks)
    model.jit_compile = compiled.get("jit_compile", model.jit_compile)
    x, y = np.ones((64, 8, 16), "float32"), np.zeros((64, 8), "int32")
    methods = {
        "fit": lambda **with_: model.fit(x, y, batch_size=8, verbose=0, **with_),
        "evaluate": lambda **with_: model.evaluate(x, y, batch_size=8, verbose=0, **with_),
        "predict": lambda **with_: model.predict(x, batch_size=8, verbose=0, **with_),
    }
    found = {}
    for name, run in methods.items():
        run()
        with Counted() as counted:
            run(callbacks=[counted])
        found[name] = counted.of_a_step
    return found


def few_and_many(_rank, rules):
    shardcore.install(strategy="dtensor" if rules is not None else "single")
    if rules is not None:
        mesh = keras.distribution.DeviceMesh((1, 2), ("data", "model"))
        layouts = keras.distribution.LayoutMap(mesh)
        for path, axes in rules.items():
            layouts[path] = axes
        parallel = keras.distribution.ModelParallel(layout_map=layouts, batch_dim_name="data")
        keras.distribution.set_distribution(parallel)
    return functions_called(FEW), functions_called(MANY), functions_called(FEW, jit_compile=False)


MEGATRON = {
    ".*(query|key|value)/kernel": (None, "model", None),
    ".*attention_output/kernel": ("model", None, None),
}


@pytest.mark.parametrize("rules", [None, {}, MEGATRON], ids=["single", "replicated", "megatron"])
def test_a_step_of_many_layers_calls_no_more_python(rules):
    (few, many, eager), *_ = run_ranks(few_and_many, 1 if rules is None else 2, rules)
    assert few == many
    for name, calls in few.items():
        assert calls < eager[name]
