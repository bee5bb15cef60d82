"""The step that `shardcore.explain` runs: which one, on what, and that it leaves no trace."""

import random
import threading

import keras
import numpy as np
import pytest
import torch

import shardcore
from shardcore.domain.errors import ArgumentProblem, CallProblem
from shardcore.testing import run_ranks
from tests.distributed.inspection.explained import X, Y, compiled, distribute_by, net
from tests.distributed.programs import distribute, local


def test_nothing_is_changed_by_it():
    """Not by a step with random layers, batch statistics, momentum, metrics and a seed of Keras."""

    def build():
        x = keras.Input((16,))
        h = keras.layers.Dense(8, name="hidden")(x)
        h = keras.layers.BatchNormalization()(h)
        h = keras.layers.Dropout(0.5)(h)
        return compiled(keras.Model(x, keras.layers.Dense(8, name="out")(Noise()(h))))

    class Noise(keras.layers.Layer):
        def call(self, x):
            return x + keras.random.normal((8,)) + torch.rand(8) + random.random()

    def state(model):
        variables = [*model.variables, *model.optimizer.variables, *model.metrics_variables]
        kept = {v.path + str(n): local(v) for n, v in enumerate(variables)}
        gradients = [v._value.grad for v in model.trainable_variables]
        values = [g if g is None else g.to_local().clone().numpy() for g in gradients]
        return kept, [id(g) for g in gradients], values, torch.get_rng_state().numpy()

    def program(rank, strategy, explains):
        keras.utils.set_random_seed(1)
        shardcore.install(strategy)
        distribution = distribute_by((2, 1), {".*hidden/kernel": ("data", None)})
        keras.distribution.set_distribution(distribution)
        model = build()
        losses = [model.train_on_batch(X, Y)[0]]
        before = state(model)
        if explains:
            for step, batch in (("train", (X, Y)), ("test", (X, Y)), ("predict", X)):
                assert shardcore.explain(model, batch, step).step == step
            assert_same(state(model), before)
        return [*losses, *(model.train_on_batch(X, Y)[0] for _ in range(2))]

    run_ranks(program, 2, "manual", True, timeout=120)
    with_it, without = (run_ranks(program, 2, "dtensor", on, timeout=120) for on in (True, False))
    assert with_it == without


def assert_same(after, before):
    """The same objects, and the same values to the last bit."""
    assert after[1] == before[1]
    for one, other in (
        (after[0], before[0]),
        (dict(enumerate(after[2])), dict(enumerate(before[2]))),
    ):
        assert one.keys() == other.keys()
        for name, value in one.items():
            np.testing.assert_array_equal(value, other[name], err_msg=name)
    np.testing.assert_array_equal(after[3], before[3])


def test_test_and_predict_steps_are_explained():
    def program(rank):
        distribute((2, 1))
        model = net()
        tested, predicted = (
            shardcore.explain(model, batch, step)
            for step, batch in (("test", (X, Y)), ("predict", X))
        )
        keras.distribution.set_distribution(None)  # a sharded model outlives it
        assert shardcore.explain(model, X, "predict") == predicted
        return tested, predicted

    for tested, predicted in run_ranks(program, 2):
        assert {each.phase for each in tested.collectives} == {"loss and metrics"}
        (gather,) = predicted.collectives
        assert (gather.kind, gather.operand_bytes) == ("all_gather", 4 * 8 * 4)
        assert "what the step returns" in gather.reason


def test_without_ranks_nothing_is_moved_and_it_says_so():
    def program(rank, mesh):
        shardcore.install()
        if mesh:
            keras.distribution.set_distribution(distribute_by(mesh, {}))
        explanation = shardcore.explain(net(), (X, Y, np.ones(8)))
        assert [each.path for each in explanation.layers] == [
            "net", "net/up", "net/down", "net/norm", "net/out"
        ]  # fmt: skip
        return str(explanation), explanation.calls

    for mesh, why in ((None, "no distribution is set"), ((1, 1), "the mesh is of one device")):
        ((shown, calls),) = run_ranks(program, 1, mesh)
        assert why in " ".join(shown.split())
        assert not calls


NO_EXPLANATIONS = [
    (
        lambda model: (model, (X, Y), "fit"),
        ArgumentProblem,
        r"one of .*'test'.* for explain\(step\), got 'fit'",
    ),
    (lambda model: ("model", (X, Y)), ArgumentProblem, "a Keras model for .*, got str"),
    (
        lambda model: (keras.Sequential([keras.layers.Dense(1)]), (X, Y)),
        CallProblem,
        "not compiled",
    ),
    (lambda model: (model, X), ArgumentProblem, r"\(x, y\) or .* got ndarray of shape \(8, 16\)"),
    (lambda model: (model, None), ArgumentProblem, "got NoneType"),
    (
        lambda model: (model, (X, Y[:4])),
        ArgumentProblem,
        r"as many rows each for .* got \(\(8, 16\) float32, \(4, 8\)",
    ),
    (lambda model: (model, (None, Y)), ArgumentProblem, r"for explain\(batch\)"),
]


def test_a_step_that_cannot_be_explained_is_an_error():
    def program(rank):
        shardcore.install()
        for call, kind, says in NO_EXPLANATIONS:
            with pytest.raises(kind, match=says):
                shardcore.explain(*call(net()))

    run_ranks(program, 1)


def test_another_thread_is_refused():
    def program(rank):
        shardcore.install()
        model, errors = net(), []

        def attempt():
            try:
                shardcore.explain(model, (X, Y))
            except CallProblem as error:
                errors.append(str(error))

        thread = threading.Thread(target=attempt)
        thread.start()
        thread.join()
        return errors

    ((error,),) = run_ranks(program, 1)
    assert "call it on the main thread" in error


def test_a_collective_of_the_user_is_explained_without_a_distribution():
    class Own(keras.Sequential):
        def train_step(self, data):
            total = torch.ones(3)
            torch.distributed.all_reduce(total)
            return {"total": total.sum()}

    def program(rank):
        shardcore.install()
        model = Own([keras.Input((16,)), keras.layers.Dense(8)])
        model.compile("sgd", "mse")
        return shardcore.explain(model, (X, Y)).collectives

    for (own,) in run_ranks(program, 2):
        assert (own.kind, own.axes, own.ranks, own.operand_bytes) == ("all_reduce", (), 2, 12)
