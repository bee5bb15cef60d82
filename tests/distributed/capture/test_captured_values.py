"""Steps that look at values: what they read is part of the trace, or decides which one runs."""

import itertools

import keras
import numpy as np
import pytest
import torch
import torch.distributed as dist

from shardcore.adapters.capture.passes import checks
from shardcore.adapters.capture.passes.checks import with_checks
from shardcore.adapters.capture.passes.collectives import with_late_waits
from shardcore.adapters.torch_private import collectives
from shardcore.binding.capture import cache
from shardcore.testing import run_ranks
from tests.distributed.capture.reading_layers import LAYERS, dense, network
from tests.distributed.capture.steps import (
    Spy,
    assert_equal,
    begin,
    calls,
    compiled,
    is_real,
    messages,
    state,
)
from tests.distributed.programs import IS_ON_GPU
from tests.traces import names, recorded

RNG = np.random.default_rng(5)
STEPS = 6
X, Y = RNG.integers(0, 4, (8, 4)).astype("float32"), RNG.integers(0, 4, 8)


@pytest.mark.parametrize(
    ("shape", "cases"), [(None, [*LAYERS]), ((1, 2), ["beta", "spectral", "nadam"])]
)
def test_values_that_torch_or_keras_reads_for_itself_are_no_reason_to_run_eagerly(shape, cases):
    def program(rank):
        begin(shape)
        return {name: [trained(*LAYERS[name], jit) for jit in (False, "auto")] for name in cases}

    for found in run_ranks(program, 1 if shape is None else 2, timeout=120):
        for name, ((eager, _), (captured, runs)) in found.items():
            assert_equal(captured, eager)
            is_recorded = not IS_ON_GPU or name not in ("gamma", "beta", "binomial")
            assert (name, runs) == (name, 2 if is_recorded else STEPS)


def trained(build, optimizer, jit):
    """The results of some steps of a model, and how often its Python ran."""
    model = compiled(build, jit, optimizer)
    calls.clear()
    # The largest class is another one in each batch.
    losses = [model.train_on_batch(X % (2 + step % 3), Y) for step in range(STEPS)]
    return [*map(np.asarray, losses), *state(model)], len(calls)


@pytest.mark.skipif(IS_ON_GPU, reason="there torch checks no class on the host")
def test_a_class_out_of_range_is_an_error_of_a_captured_step_too():
    def program(rank):
        begin(None)
        model = compiled(*LAYERS["one_hot"][:1], "auto")
        for _ in range(4):
            model.train_on_batch(X, Y)
        with pytest.raises(RuntimeError, match="Class values must be smaller"):
            model.train_on_batch(X + 1, Y)
        return len(calls)

    assert run_ranks(program, 1) == [2]


def half():
    """A network in half precision whose state depends on how often its steps were begun."""
    x = keras.Input((4,))
    h = keras.layers.Dense(4, name="head")(keras.layers.BatchNormalization()(Spy()(x)))
    h = keras.layers.Dropout(0.3, seed=3)(keras.layers.Dropout(0.3)(h))
    return keras.Model(x, keras.layers.Dense(4)(h))


class OwnSgd(keras.optimizers.SGD):
    """An optimizer of a user: whether its code runs, Keras asks on the host."""


def overflowing(jit, steps):
    """Training in which the scale of the loss grows, until gradients overflow, and is halved."""
    policy = keras.config.dtype_policy()
    keras.config.set_dtype_policy("mixed_float16")
    optimizer = keras.optimizers.LossScaleOptimizer(
        OwnSgd(1e-3), initial_scale=2.0**14, dynamic_growth_steps=2
    )
    model = compiled(half, jit, optimizer)
    keras.config.set_dtype_policy(policy)
    calls.clear()
    runs, scales = [], []
    for _ in range(steps):
        model.train_on_batch(X, Y)
        runs.append(len(calls))
        scales.append(float(optimizer.dynamic_scale))
    return [np.asarray(scales), *state(model)], runs


@pytest.mark.parametrize(("shape", "steps"), [(None, 26), ((2, 1), 15)])
def test_a_step_takes_the_branch_that_its_gradients_choose(shape, steps):
    def program(rank):
        begin(shape)
        return overflowing(False, steps), overflowing("auto", steps)

    for (eager, _), (captured, runs) in run_ranks(program, 1 if shape is None else 2, timeout=90):
        assert_equal(captured, eager)
        scales = eager[0].tolist()
        assert {b / a for a, b in itertools.pairwise(scales)} == {0.5, 1.0, 2.0}
        assert runs[-1] == 6  # two of each way


class Branches(Spy):
    def call(self, x):
        x = super().call(x)
        return x * 2 if is_real(x) and keras.ops.sum(x) > 40 else x


class PadsWithItsLargest(Spy):
    def call(self, x):
        x = super().call(x)
        largest = x.max() if is_real(x) else 0
        return torch.nn.functional.pad(x, (1, 1), value=largest) if is_real(x) else wider(x)


def wider(x):
    return keras.ops.pad(x, ((0, 0), (1, 1)))


class Scales(Spy):
    def call(self, x):
        x = super().call(x)
        return x / float(keras.ops.sum(x)) if is_real(x) else x


@pytest.mark.parametrize(
    ("layer", "recorded"), [(Branches, 4), (PadsWithItsLargest, 6), (Scales, 24)]
)
def test_values_read_from_a_batch_choose_the_recording(layer, recorded):
    def program(rank, jit):
        begin(None)
        model = compiled(network(layer, dense), jit, "sgd")
        calls.clear()
        found = [model.train_on_batch(scaled(layer, step), Y) for step in range(24)]
        return [*map(np.asarray, found), *state(model)], len(calls)

    ((eager, _),) = run_ranks(program, 1, False)
    ((captured, runs),) = run_ranks(program, 1, "auto")
    assert_equal(captured, eager)
    assert runs == recorded  # another number in each step is too many ways


def scaled(layer, step):
    """A batch; what a layer reads of it is one of three numbers, or another one each time."""
    return X * (step + 1 if layer is Scales else step % 3)


class Counting(Spy):
    def build(self, shape):
        self.counts = self.add_weight(shape=(2,), trainable=False)

    def call(self, x):
        x = super().call(x)
        self.counts.assign_add([1.0, 1.0])
        return x * 2 if is_real(x) and keras.ops.sum(x) + self.counts[0] > 40 else x


def test_a_step_that_has_written_much_before_it_reads_is_not_captured():
    def program(rank):
        checks._MOST_BYTES = 4
        begin(None)
        said = messages()
        model = compiled(network(Counting, dense), "auto", "sgd")
        for _ in range(3):
            model.train_on_batch(X, Y)
        return said

    ((said,),) = run_ranks(program, 1)
    assert "after it has written 8 bytes it reads values on the host" in said


def test_a_branch_that_ran_once_is_dropped_after_many_runs():
    def program(rank):
        cache._MANY_RUNS = 4
        begin(None)
        model = compiled(network(Branches, dense), "auto", "sgd")
        calls.clear()
        for factor in (0, 0, 1, *(0,) * 4, 1, 1, 1):
            model.train_on_batch(X * factor, Y)
        return len(calls)

    assert run_ranks(program, 1) == [5]


def test_no_collective_is_on_its_way_where_a_step_may_be_left():
    def step(x):
        sent = collectives.all_reduce(x, "sum", dist.group.WORLD)
        number = float(x[0])
        return collectives.wait(sent) * number

    def program(rank):
        trace = recorded(step, torch.ones(2))
        trace = with_checks(trace, trace.reads)
        return names(trace), names(with_late_waits(trace))

    for before, after in run_ranks(program, 2):
        assert before[-2:] == ["check", "mul"]
        assert after[-3:] == ["wait_tensor", "check", "mul"]


class Early(keras.layers.Layer):
    """Makes its variable before it is built: the path has no name of a layer around it."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.scale = self.add_weight(shape=(4,), initializer="ones", name="scale")

    def call(self, x):
        return x * self.scale


class Holder(Spy):
    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.early = Early(name="early")

    def call(self, x):
        return self.early(super().call(x))


def test_a_gradient_that_keras_does_not_clear_adds_up_in_a_captured_step_too():
    """Two variables have one path, and Keras tells torch of one of them."""

    def build():
        inputs = keras.Input((4,))
        return keras.Model(inputs, Holder()(keras.layers.Dense(4)(Holder()(inputs))))

    def program(rank, is_eager):
        begin(None if is_eager is None else (2, 1))
        said = messages()
        model = compiled(build, not is_eager and "auto", "sgd")
        losses = [model.train_on_batch(X, Y)[0] for _ in range(5)]
        assert len({v.path for v in model.variables}) < len(model.variables)
        return np.array(losses), calls.clear(), said

    (expected, _, _), *_ = run_ranks(program, 1, None)
    for is_eager in (True, False):
        for losses, _, said in run_ranks(program, 2, is_eager):
            assert not said
            np.testing.assert_allclose(losses, expected, rtol=1e-5)
