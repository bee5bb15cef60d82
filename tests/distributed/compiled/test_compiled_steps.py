"""A step that Inductor compiles has the numbers of the eager one, or is captured with a message."""

import keras
import numpy as np
import pytest
import torch

from shardcore.adapters.torch_private import inductor, is_all_reduce
from shardcore.testing import run_ranks
from tests.distributed.capture.steps import (
    STEPS,
    Spy,
    batches,
    begin,
    messages,
    plain_mlp,
    reasons,
    state,
    trained,
)
from tests.distributed.programs import needs_compiler


def pair():
    x = keras.Input((6,))
    h = keras.layers.Dense(8, activation="relu", use_bias=False, name="first")(x)
    return keras.Model(x, keras.layers.Dense(4, use_bias=False, name="head")(h))


def drawn():
    x = keras.Input((6,))
    h = keras.layers.Dense(8, activation="relu", use_bias=False, name="first")(Spy()(x))
    h = keras.layers.Dropout(0.2, seed=5)(keras.layers.Dropout(0.2)(h))
    return keras.Model(x, keras.layers.Dense(4, use_bias=False, name="head")(h))


def few_kernels(build, jit):
    """Compiles the model for Keras, without metrics: a compiler takes a second for each kernel."""
    keras.utils.set_random_seed(7)
    model = build()
    model.compile(keras.optimizers.SGD(0.1, momentum=0.9), "mse", jit_compile=jit)
    return model


def rows(steps=STEPS):
    return [(x, np.eye(4, dtype="float32")[y]) for x, y in batches(plain_mlp, steps)]


@needs_compiler
def test_a_compiled_step_has_the_numbers_of_the_eager_one():
    def program(rank):
        begin(None)
        said = messages()
        return [trained(few_kernels(drawn, jit), rows()) for jit in (False, True)], said

    ((((eager, _), (captured, runs)), said),) = run_ranks(program, 1, timeout=300)
    assert runs == 2
    assert not said  # all of it is compiled
    for one, other in zip(captured, eager, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)


class Recurrent(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm = torch.nn.LSTM(2, 4, batch_first=True)

    def forward(self, x):
        return self.lstm(x)[0][:, -1]


@needs_compiler
def test_a_recurrent_layer_of_torch_has_the_numbers_of_the_eager_step():
    """oneDNN's returns no workspace where gradients are not recorded, as in a program."""

    def losses(jit_compile):
        keras.utils.set_random_seed(1)
        reshaped = keras.layers.Reshape((2, 2))
        recurrent = keras.layers.TorchModuleWrapper(Recurrent())
        model = keras.Sequential([keras.Input((4,)), reshaped, recurrent])
        model.compile("sgd", "mse", jit_compile=jit_compile)
        x = np.random.default_rng(1).normal(size=(8, 4)).astype("float32")
        return [float(model.train_on_batch(x, x)) for _ in range(5)]

    def program(rank):
        begin(None)
        said = messages()
        return [losses(jit_compile) for jit_compile in (False, "auto", True)], said

    (((eager, captured, compiled), said),) = run_ranks(program, 1, timeout=300)
    assert captured == eager
    assert compiled == pytest.approx(eager, rel=1e-5)
    assert not said


@needs_compiler
@pytest.mark.parametrize("shape", [(2, 1), (1, 2)])
def test_a_compiled_step_of_two_ranks_has_the_numbers_of_the_eager_one(shape):
    by_torch, sums = inductor.compile_graph, []

    def noted(graph, examples):
        sums.append([is_all_reduce(node.target) for node in graph.graph.nodes].count(True))
        return by_torch(graph, examples)

    def program(rank):
        inductor.compile_graph = noted
        said = messages()
        begin(shape)
        return [trained(jit) for jit in (False, True)], said, sums

    def trained(jit):
        model = few_kernels(pair, jit)
        losses = [model.train_on_batch(x, y) for x, y in rows(5)]
        return [*map(np.asarray, losses), *state(model)]

    for (eager, captured), said, reduced in run_ranks(program, 2, timeout=300):
        assert not said  # all of it is compiled,
        assert reduced == [1]  # the sum too: of gradients and logs, or of what a layer makes
        for one, other in zip(captured, eager, strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)


def test_a_step_that_fails_to_compile_is_captured_with_a_message():
    def fails(*given):
        raise RuntimeError("no compiler is here")

    def program(rank):
        inductor.compile_graph = fails
        return reasons(Spy, True)

    ((said, runs),) = run_ranks(program, 1)
    assert runs == 2
    assert len(said) == 1
    assert "not compiled as jit_compile=True asks: RuntimeError: no compiler is here" in said[0]
