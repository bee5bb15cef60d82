"""A captured step sees each change that the eager one would see."""

import sys

import keras
import numpy as np
import pytest
import torch

from shardcore.adapters.torch_private import inductor
from shardcore.testing import run_ranks
from tests.distributed.capture.reading_layers import CHANGES_WITHIN, Holding
from tests.distributed.capture.steps import (
    Spy,
    assert_equal,
    batches,
    begin,
    calls,
    compiled,
    is_real,
    messages,
    mlp,
    state,
)


def assign(model, data):
    model.get_layer("head").kernel.assign(np.full((8, 4), 0.25, "float32"))


def learn_slower(model, data):
    model.optimizer.learning_rate = 1e-4


def freeze(model, data):
    model.get_layer("first").trainable = False


def drop_more(model, data):
    model.layers[-3].rate = 0.9


def put_weights_back(model, data):
    model.set_weights([np.zeros_like(each) for each in model.get_weights()])


def compile_again(model, data):
    model.compile("sgd", model.loss, jit_compile=model.jit_compile)


def other_rows(model, data):
    data[:] = [(x[:6], y[:6]) for x, y in data]


def regularize_less(model, data):
    model.get_layer("first").kernel_regularizer.l2 = 1e-6


def other_element(model, data):
    model.layers[1].factors[0] = 3.0


def other_function(model, data):
    model.get_layer("first").activation = keras.activations.tanh


CHANGES = [
    assign,
    other_element,
    other_function,
    learn_slower,
    freeze,
    drop_more,
    put_weights_back,
    compile_again,
    other_rows,
    regularize_less,
]


@pytest.mark.parametrize(("shape", "changes"), [(None, CHANGES), ((1, 2), CHANGES[::3])])
def test_a_change_between_steps_is_seen_by_the_next_step(shape, changes):
    def program(rank):
        begin(shape)
        return [{c.__name__: changed(c, jit) for c in changes} for jit in (False, "auto")]

    def changed(change, jit):
        model, data = compiled(mlp, jit), batches(mlp, 5)
        losses = [model.train_on_batch(x, y) for x, y in data]
        change(model, data)
        losses += [model.train_on_batch(x, y) for x, y in data]
        return [*map(np.asarray, losses), *state(model)]

    for eager, captured in run_ranks(program, 1 if shape is None else 2, timeout=180):
        for name in eager:
            assert_equal(captured[name], eager[name])
        found = [str(each) for each in eager.values()]
        assert len(set(found)) == len(found), "two changes made no difference"


@pytest.mark.parametrize("shape", [None, (1, 2)])
def test_a_step_under_autocast_is_another_one_and_is_not_cast_twice(shape):
    """A step in `float32` is captured before, and what follows runs from its trace again."""

    def program(rank):
        begin(shape)
        return [autocasting(jit) for jit in (False, "auto")]

    def autocasting(jit):
        model, data, found, runs = compiled(mlp, jit), batches(mlp, 5), [], []
        for enabled in (False, True, False):
            calls.clear()
            for x, y in data:
                with torch.autocast("cpu", torch.bfloat16, enabled=enabled, cache_enabled=False):
                    found += [*model.train_on_batch(x, y), model.predict_on_batch(x)]
            runs.append(len(calls))
        return [*map(np.asarray, found), *state(model)], runs

    for (eager, eager_runs), (captured, runs) in run_ranks(program, 1 if shape is None else 2):
        assert_equal(captured, eager)
        assert (eager_runs, runs) == ([10, 10, 10], [4, 4, 0])


def test_a_change_in_a_nested_object_or_a_class_is_seen():
    def program(rank, jit):
        begin(None)
        keras.utils.set_random_seed(1)
        x = keras.Input((4,))
        model = keras.Model(x, keras.layers.Dense(1)(Holding()(x)))
        model.compile("sgd", "mse", jit_compile=jit)
        calls.clear()
        losses = []
        for change in CHANGES_WITHIN:
            data = np.ones((4, 4), "float32"), np.ones((4, 1), "float32")
            losses += [float(model.train_on_batch(*data)) for _ in range(4)]
            change(model.layers[1])
        losses += [float(model.train_on_batch(*data)) for _ in range(4)]
        return losses, len(calls)

    ((losses, runs),) = run_ranks(program, 1, "auto")
    ((eager, _),) = run_ranks(program, 1, False)
    assert_equal(losses, eager)
    assert runs == 2 + 2 * len(CHANGES_WITHIN)


@pytest.mark.parametrize(
    ("switch", "on", "off"),
    [
        (torch.set_default_dtype, torch.float64, torch.float32),
        (torch.use_deterministic_algorithms, True, False),
    ],
)
def test_a_step_in_another_mode_of_torch_is_recorded_by_itself(switch, on, off):
    def program(rank):
        begin(None)
        model, data, runs = compiled(mlp, "auto"), batches(mlp, 5), []
        for mode in (off, on, off, on):
            calls.clear()
            switch(mode)
            for x, y in data:
                model.train_on_batch(x, y)
            runs.append(len(calls))
        return runs

    assert run_ranks(program, 1) == [[2, 2, 0, 0]]


class OfTorch(keras.Model):
    """It learns by an optimizer of torch, which keeps its options in dicts in a list."""

    def train_step(self, data):
        x, y = data
        if not hasattr(self, "torchs"):
            parameters = [weight.value for weight in self.trainable_weights]
            self.torchs = torch.optim.SGD(parameters, 0.05, momentum=0.5)
        loss = torch.nn.functional.mse_loss(self(x, training=True), y)
        self.torchs.zero_grad()
        loss.backward()
        self.torchs.step()
        return {"loss": loss}


@pytest.mark.parametrize("shape", [None, (2, 1)])
def test_a_change_in_an_optimizer_of_torch_is_seen(shape):
    x, y = (np.random.default_rng(0).normal(size=(8, 4)).astype("float32") for _ in range(2))

    def trained(jit):
        begin(shape)
        keras.utils.set_random_seed(1)
        inputs = keras.Input((4,))
        model = OfTorch(inputs, keras.layers.Dense(4)(Spy()(inputs)))
        model.compile(jit_compile=jit)
        calls.clear()
        losses, runs = [], []
        for rate in (0.05, 0.5, 0.0):
            losses += model.fit(x, y, batch_size=4, epochs=3, verbose=0).history["loss"]
            model.torchs.param_groups[0]["lr"] = rate
            if rate == 0.05:  # it makes other lists and dicts; a changed number must do alone
                model.torchs.load_state_dict(model.torchs.state_dict())
            runs.append(len(calls))
        return losses, runs, model.get_weights()

    def program(rank):
        # The graphs run without Inductor: its seconds would show nothing more.
        inductor.compile_graph = lambda graph, examples: graph
        return trained(False), trained(True)

    ranks = 2 if shape else 1
    for (expected, _, weights), (losses, runs, found) in run_ranks(program, ranks):
        np.testing.assert_allclose(losses, expected, rtol=1e-5)
        np.testing.assert_allclose(found[0], weights[0], rtol=1e-4, atol=1e-6)
        assert runs[0] < 6


def test_another_global_seed_is_seen():
    class Noisy(Spy):
        def call(self, x):
            x = super().call(x)
            return x + keras.random.normal(x.shape) if is_real(x) else x

    def program(rank, jit):
        begin(None)
        keras.utils.set_random_seed(1)
        x = keras.Input((4,))
        model = keras.Model(x, keras.layers.Dense(1)(Noisy()(x)))
        model.compile("sgd", "mse", jit_compile=jit)
        losses = []
        for step in range(9):
            if step == 5:
                keras.utils.set_random_seed(2)
            x, y = np.ones((4, 4), "float32"), np.ones((4, 1), "float32")
            losses.append(float(model.train_on_batch(x, y)))
        return losses

    assert run_ranks(program, 1, "auto") == run_ranks(program, 1, False)


def test_the_state_of_a_torch_module_is_read_at_each_step():
    class Scaled(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = torch.nn.Linear(4, 1)
            self.register_buffer("scale", torch.ones(1))

        def forward(self, x):
            if is_real(x):
                self.scale.mul_(1.5)
            return self.linear(x) * self.scale

    def program(rank, jit):
        begin(None)
        keras.utils.set_random_seed(1)
        model = keras.Sequential([keras.layers.TorchModuleWrapper(Scaled())])
        model.compile("sgd", "mse", jit_compile=jit)
        x, y = np.ones((4, 4), "float32"), np.ones((4, 1), "float32")
        losses = [float(model.train_on_batch(x, y)) for _ in range(5)]
        module = model.layers[0].module
        module.scale = torch.full_like(module.scale, 0.1)
        return losses + [float(model.train_on_batch(x, y)) for _ in range(5)]

    assert_equal(run_ranks(program, 1, "auto"), run_ranks(program, 1, False))


class ComputesNames(Spy):
    """It computes the names of its numbers; no code reads the file that it holds."""

    def __init__(self, file):
        super().__init__()
        self.file, self.scale_0, self.scale_1 = file, 1.0, 2.0

    def call(self, x):
        scales = [getattr(self, f"scale_{number}") for number in range(2)]
        return super().call(x * sum(scales))


def test_computed_names_of_attributes_are_seen_and_others_do_not_count():
    def losses(run_eagerly):
        keras.utils.set_random_seed(3)
        layer, found = ComputesNames(sys.stdout), []
        model = keras.Sequential([keras.Input((4,)), layer, keras.layers.Dense(1)])
        model.compile("sgd", "mse", run_eagerly=run_eagerly)
        for step in range(8):
            layer.scale_1 = 2.0 if step < 4 else 5.0
            calls.clear()
            found.append(float(model.train_on_batch(np.ones((4, 4)), np.ones((4, 1)))))
        return found, len(calls)

    def program(rank):
        begin(None)
        said = messages()
        return losses(True)[0], losses(False), said

    ((eager, (found, runs), said),) = run_ranks(program, 1)
    assert (found, runs, said) == (eager, 0, [])
