"""Plain tensors meet sharded ones: on which threads, and from when until when they may."""

import contextlib
import threading
from concurrent.futures import ThreadPoolExecutor

import keras
import numpy as np
import pytest
import torch

import shardcore
from shardcore.domain.errors import CallProblem
from shardcore.testing import run_ranks
from tests.distributed.programs import (
    as_arrays,
    assert_close,
    distribute,
    placements,
)

RNG = np.random.default_rng(0)
X = RNG.normal(size=(6, 4)).astype("float32")
Y = RNG.normal(size=(6, 2)).astype("float32")
SCALE = torch.linspace(0.5, 1.5, 2)
RULES = {".*/hidden/kernel": (None, "model"), ".*/head/kernel": ("model", None)}


def build():
    keras.utils.set_random_seed(1)
    hidden = keras.layers.Dense(4, activation="tanh", name="hidden")
    model = keras.Sequential([keras.Input((4,)), hidden, keras.layers.Dense(2, name="head")])
    model.compile(keras.optimizers.SGD(0.1), "mse")
    return model


def loss_of(model):
    """Written by hand: plain tensors in the forward pass, and saved for the backward pass."""
    return keras.ops.mean(
        keras.ops.square((model(torch.as_tensor(X)) - torch.as_tensor(Y)) * SCALE)
    )


def train(model):
    for _ in range(2):
        model.zero_grad()
        loss_of(model).backward()
        with torch.no_grad():
            variables = model.trainable_variables
            model.optimizer.apply([v.value.grad for v in variables], variables)


def weights(model):
    return {variable.path: variable.numpy() for variable in model.variables}


def on_thread(function, *args):
    """The result or error of `function` on a separate thread, while this one waits."""
    results = []

    def run():
        try:
            results.append(function(*args))
        except Exception as error:  # noqa: BLE001 - the test looks at it
            results.append(error)

    thread = threading.Thread(target=run, name="mine")
    thread.start()
    thread.join()
    return results[0]


def test_threads_compute_with_a_sharded_model_and_train_it_in_a_scope():
    def program(rank, mesh):
        scope = distribute(mesh, RULES).scope if mesh else contextlib.nullcontext
        model = build()

        def trained():
            with scope():
                train(model)

        hidden = [on_thread(model.layers[0], torch.as_tensor(X)) for _ in range(2)]
        on_thread(trained)
        places = {placements(each) for each in hidden}
        return as_arrays({"first": hidden[0], "second": hidden[1], **weights(model)}), places

    ((reference, _),) = run_ranks(program, 1, None)
    results = run_ranks(program, 2, (1, 2))
    assert_close([values for values, _ in results], reference)
    assert all(places == {"R S(1)"} for _, places in results)


def test_a_collective_on_a_thread_without_a_scope_is_an_error_on_every_rank():
    def program(rank):
        distribute((1, 2), RULES)
        model = build()
        kernel = model.layers[0].kernel

        def gather():
            return kernel.value.full_tensor()

        def compute():
            return torch.tanh(model(torch.as_tensor(X)))

        tries = (compute,), (kernel.numpy,), (gather,), (model.predict, X)
        return [on_thread(*each) for each in tries]

    for errors in run_ranks(program, 2):
        for error in errors:
            assert isinstance(error, CallProblem), error
            assert "'mine'" in str(error)
            assert "distribution.scope()" in str(error)


def test_plain_tensors_mix_with_sharded_ones_on_every_thread_whatever_is_set():
    """No scope is asked: a plain tensor that meets a sharded one counts as replicated."""

    def program(rank):
        distribute((1, 2), RULES)
        model = build()
        kernel = model.layers[0].kernel.value.detach()

        def mixed():
            return placements(kernel + torch.ones(4, 4))

        with ThreadPoolExecutor(1) as thread:
            found = [mixed(), thread.submit(mixed).result()]
            keras.distribution.set_distribution(None)
            found += [mixed(), thread.submit(mixed).result()]
            shardcore.uninstall()
            return [*found, mixed(), thread.submit(mixed).result()]

    assert run_ranks(program, 2) == [["R S(1)"] * 6] * 2


def test_the_backward_pass_and_fit_after_the_scope_are_those_of_one_device():
    def program(rank, mesh):
        scope = distribute(mesh, RULES).scope if mesh else contextlib.nullcontext
        if mesh:
            keras.distribution.set_distribution(None)
        with scope():
            model = build()
            loss = loss_of(model)
            pair = shardcore.ensure_dtensor_input((X, Y)) if mesh else map(torch.as_tensor, (X, Y))
            x, y = pair
            mean = torch.nn.functional.mse_loss(model(x), y)
        values = {}
        for name, each in {"by hand": loss, "mean": mean}.items():
            model.zero_grad()
            each.backward()
            grads = {f"{name} {v.path}": v.value.grad for v in model.trainable_variables}
            values |= as_arrays({key: grad.clone() for key, grad in grads.items()})
        model.fit(X, Y, batch_size=3, shuffle=False, verbose=0)
        predicted = model.predict(X, verbose=0)
        return {**values, **weights(model), "predicted": predicted}

    (reference,) = run_ranks(program, 1, None)
    assert_close(run_ranks(program, 2, (2, 1)), reference)


class Leaves(keras.Model):
    """Unsets the distribution within its own step."""

    def __init__(self):
        super().__init__()
        self.hidden = keras.layers.Dense(2, name="hidden")

    def call(self, x):
        return self.hidden(x)

    def train_step(self, data):
        keras.distribution.set_distribution(None)
        return super().train_step(data)


def test_a_step_that_unsets_the_distribution_trains_as_one_that_does_not():
    def program(rank):
        distribute((1, 2), {".*/hidden/kernel": (None, "model")})
        keras.utils.set_random_seed(1)
        model = Leaves()
        model.compile("sgd", "mse")
        loss = model.train_on_batch(X, Y)
        return float(loss)

    def alone(rank):
        keras.utils.set_random_seed(1)
        model = Leaves()
        model.compile("sgd", "mse")
        return float(model.train_on_batch(X, Y))

    (expected,) = run_ranks(alone, 1)
    assert run_ranks(program, 2) == [pytest.approx(expected)] * 2


def test_uninstall_waits_for_no_thread_but_names_it():
    def program(rank):
        distribution = distribute((1, 2), RULES)
        inside, leave = threading.Event(), threading.Event()

        def stay():
            with distribution.scope():
                inside.set()
                leave.wait(10)

        on_thread(keras.distribution.set_distribution, distribution)  # and ends with it
        thread = threading.Thread(target=stay, name="mine")
        thread.start()
        inside.wait(10)
        with pytest.raises(CallProblem, match="thread 'mine' has a distribution"):
            shardcore.uninstall()
        leave.set()
        thread.join()
        shardcore.uninstall()

    run_ranks(program, 2)
