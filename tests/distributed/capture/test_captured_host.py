"""The Python of a captured step is as much for a model of many layers as for one of few."""

import gc
import resource
import sys
from pathlib import Path

import keras
import numpy as np
import pytest

import shardcore
from shardcore.testing import run_ranks
from tests.distributed.programs import needs_compiler

FEW, MANY = 1, 2


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


def model_of_few_kernels(blocks):
    """For Inductor: a compiler takes a second for each kernel."""
    inputs = x = keras.Input((8, 16))
    for _ in range(blocks):
        x = keras.layers.Dropout(0.1)(keras.layers.MultiHeadAttention(2, 8, use_bias=False)(x, x))
    model = keras.Model(inputs, keras.layers.Dense(1, use_bias=False, name="head")(x)[..., 0])
    model.compile("sgd", "mse", jit_compile=True)
    return model


class Counted(keras.callbacks.Callback):
    """Counts the functions of Python that are called between the ends of batches."""

    def __init__(self):
        super().__init__()
        self.calls, self.at_ends = 0, []

    def __enter__(self):
        gc.disable()  # what others have called back by it is no step's
        sys.setprofile(self._count)
        return self

    def __exit__(self, *error):
        sys.setprofile(None)
        gc.enable()

    def _count(self, frame, event, _function):
        self.calls += event == "call"

    def _end(self, batch, logs=None):
        self.at_ends.append(self.calls)

    on_train_batch_end = on_test_batch_end = on_predict_batch_end = _end

    @property
    def of_a_step(self):
        """Of the last step but one: after the last the loop of Keras ends."""
        return self.at_ends[-2] - self.at_ends[-3]


def functions_called(model, only=("fit", "evaluate", "predict")):
    """By method, how many functions of Python one of its steps calls."""
    x, y = np.ones((32, 8, 16), "float32"), np.zeros((32, 8), "int32")
    methods = {
        "fit": lambda **with_: model.fit(x, y, batch_size=8, verbose=0, **with_),
        "evaluate": lambda **with_: model.evaluate(x, y, batch_size=8, verbose=0, **with_),
        "predict": lambda **with_: model.predict(x, batch_size=8, verbose=0, **with_),
    }
    found = {}
    for name in only:
        run = methods[name]
        run(callbacks=[Counted()])  # under a profiler no step is recorded
        with Counted() as counted:
            run(callbacks=[counted])
        found[name] = counted.of_a_step
    return found


def few_and_many(_rank, shape, rules):
    shardcore.install(strategy="dtensor" if shape else "single")
    if shape:
        mesh = keras.distribution.DeviceMesh(shape, ("data", "model"))
        layouts = keras.distribution.LayoutMap(mesh)
        for path, axes in rules.items():
            layouts[path] = axes
        parallel = keras.distribution.ModelParallel(layout_map=layouts, batch_dim_name="data")
        keras.distribution.set_distribution(parallel)
    few, many, eager = map(model_of, (FEW, MANY, FEW))
    eager.jit_compile = False
    return [functions_called(model) for model in (few, many, eager)]


MEGATRON = {
    ".*(query|key|value)/kernel": (None, "model", None),
    ".*attention_output/kernel": ("model", None, None),
}


def of_compiled_steps(_rank):
    shardcore.install(strategy="single")
    models = map(model_of_few_kernels, (0, 1))
    return [functions_called(model, only=["fit"])["fit"] for model in models]


# Attention, its gradient, and the draw of `Dropout`.
LEFT_TO_TORCH = 3


@needs_compiler
def test_a_compiled_step_calls_python_for_what_inductor_leaves_to_torch_alone():
    [(without, with_block)] = run_ranks(of_compiled_steps, 1, timeout=300)
    assert with_block - without == LEFT_TO_TORCH


MESHES = {"single": ((), {}), "data parallel": ((2, 1), {}), "megatron": ((1, 2), MEGATRON)}


@pytest.mark.parametrize("name", MESHES)
def test_a_step_of_many_layers_calls_no_more_python(name):
    shape, rules = MESHES[name]
    (few, many, eager), *_ = run_ranks(few_and_many, 2 if shape else 1, shape, rules)
    assert few == many
    for name, calls in few.items():
        assert calls < eager[name]


WIDTH = 512


def grown(_rank):
    """The growth of the process over many captured steps of a fully sharded model, in bytes."""
    shardcore.install()
    mesh = keras.distribution.DeviceMesh((2, 1), ("data", "model"))
    layouts = keras.distribution.LayoutMap(mesh)
    layouts[".*kernel"] = ("data", None)
    parallel = keras.distribution.ModelParallel(layout_map=layouts, batch_dim_name="data")
    keras.distribution.set_distribution(parallel)
    dense = [keras.layers.Dense(WIDTH, activation="relu") for _ in range(6)]
    model = keras.Sequential([keras.Input((WIDTH,)), *dense])
    model.compile("adam", "mse")
    x = np.ones((64, WIDTH), "float32")
    model.fit(x, x, batch_size=8, epochs=2, verbose=0)
    before = resident()
    model.fit(x, x, batch_size=8, epochs=5, verbose=0)
    return resident() - before


def resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def test_steps_leave_no_holes_in_the_heap():
    """Records in the place of freed tensors would cost it: forty steps once lost 135 weights."""
    weight = 4 * WIDTH**2
    assert max(run_ranks(grown, 2)) < 25 * weight
