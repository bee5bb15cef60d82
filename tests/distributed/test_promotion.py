"""Plain tensors meet sharded ones: on which threads, and from when until when they may."""

import contextlib
import threading
from concurrent.futures import ThreadPoolExecutor

import keras
import numpy as np
import pytest
import torch
from torch.distributed.tensor.experimental import implicit_replication

import shardcore
from shardcore.domain.errors import StrategyError
from shardcore.testing import run_ranks
from tests.distributed.programs import (
    STRATEGY,
    as_arrays,
    assert_close,
    distribute,
    only_dtensor,
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
    """What `function` gives or raises on a thread of its own, while this one waits."""
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


def promotes(model):
    """Whether a plain tensor that meets a sharded one is promoted on this thread, now."""
    kernel = model.layers[0].kernel.value.detach()
    try:
        kernel + torch.ones(4, 4)
    except RuntimeError as error:
        if "mixed torch.Tensor and DTensor" not in str(error):
            raise
        return False
    return True


@only_dtensor
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
        return [on_thread(*each) for each in tries], promotes(model)

    for errors, promoted in run_ranks(program, 2):
        assert promoted
        for error in errors:
            assert isinstance(error, StrategyError), error
            assert "'mine'" in str(error)
            assert "distribution.scope()" in str(error)


@only_dtensor
def test_without_a_distribution_a_layer_promotes_and_nothing_else_does():
    def program(rank):
        distribute((1, 2), RULES)
        model = build()

        def look():
            try:
                model.layers[0](torch.as_tensor(X))
            except RuntimeError:
                return "fails", promotes(model)
            return "computes", promotes(model)

        with ThreadPoolExecutor(1) as thread:
            told = [thread.submit(look).result()]
            keras.distribution.set_distribution(None)
            told += [thread.submit(look).result(), look()]
            shardcore.uninstall()
            told += [thread.submit(look).result(), look()]
        return told

    expected = [("computes", False)] * 3 + [("fails", False)] * 2
    assert run_ranks(program, 2) == [expected, expected]


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
            # DTensor's own backward of this one gives the gradient times the number of ranks.
            mean = torch.nn.functional.mse_loss(model(x), y)
        values = {}
        for name, each in {"by hand": loss, "mean": mean}.items():
            model.zero_grad()
            each.backward()
            grads = {f"{name} {v.path}": v.value.grad for v in model.trainable_variables}
            values |= as_arrays({key: grad.clone() for key, grad in grads.items()})
        model.fit(X, Y, batch_size=3, shuffle=False, verbose=0)
        predicted = model.predict(X, verbose=0)
        return {**values, **weights(model), "predicted": predicted}, promotes(
            model
        ) if mesh else None

    ((reference, _),) = run_ranks(program, 1, None)
    results = run_ranks(program, 2, (2, 1))
    assert_close([values for values, _ in results], reference)
    assert [promoted for _, promoted in results] == [STRATEGY == "manual"] * 2


@only_dtensor
def test_scopes_nest_in_any_order_of_leaving():
    def program(rank):
        first = distribute((1, 2), RULES)
        model = build()
        no_rules = keras.distribution.LayoutMap(first.device_mesh)
        second = keras.distribution.ModelParallel(layout_map=no_rules, batch_dim_name="data")
        told = {}

        def within(distribution):
            with distribution.scope():
                yield promotes(model)
                yield promotes(model)

        with contextlib.suppress(KeyError), second.scope(), first.scope():
            raise KeyError
        told["after an error"] = promotes(model)
        with implicit_replication():
            pass
        told["after torch's own scope"] = promotes(model)
        keras.distribution.set_distribution(None)
        told["none"] = promotes(model)
        outer, inner = within(first), within(second)
        told["suspended"] = next(outer) and next(inner)
        outer.close()  # Keras unsets the distribution, though the inner one is suspended
        told["one closed"] = promotes(model)
        inner.close()  # Keras sets what it found, the first
        told["both closed"] = promotes(model)
        keras.distribution.set_distribution(None)
        told["none again"] = promotes(model)
        return told

    expected = {
        "after an error": True,
        "after torch's own scope": True,
        "none": False,
        "suspended": True,
        "one closed": False,
        "both closed": True,
        "none again": False,
    }
    for told in run_ranks(program, 2):
        assert told == expected


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


def test_a_step_that_unsets_the_distribution_ends_promoted_and_leaves_nothing():
    def program(rank):
        distribute((1, 2), {".*/hidden/kernel": (None, "model")})
        model = Leaves()
        model.compile("sgd", "mse")
        loss = model.train_on_batch(X, Y)
        return float(loss), torch._C._get_dtensor_allow_implicit_replication()

    (first, leaked), (second, _) = run_ranks(program, 2)
    assert not leaked
    assert first == pytest.approx(second)


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
        with pytest.raises(StrategyError, match="thread 'mine' has a distribution"):
            shardcore.uninstall()
        leave.set()
        thread.join()
        shardcore.uninstall()
        dispatcher = torch.distributed.tensor.DTensor._op_dispatcher
        return len(dispatcher._custom_op_handlers), "backward" in vars(
            torch.distributed.tensor.DTensor
        )

    def plain(rank):
        import shardcore.adapters.torch_compat  # noqa: F401 - knows torch's own handlers

        return len(torch.distributed.tensor.DTensor._op_dispatcher._custom_op_handlers), False

    (expected,) = run_ranks(plain, 1)
    assert run_ranks(program, 2) == [expected, expected]
