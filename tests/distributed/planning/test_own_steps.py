"""Models with an own train step, or without targets: plans run it with the batches of `fit`."""

import keras
import numpy as np
import pytest

import shardcore
from shardcore.domain.errors import ArgumentProblem, CallProblem
from shardcore.testing import run_ranks

X = np.random.default_rng(0).normal(size=(8, 6)).astype("float32")
Y = X[:, ::-1].copy()


class Pairs(keras.Model):
    """Its step takes inputs and targets, as in Keras' guide."""

    def __init__(self):
        super().__init__(name="net")
        self.inner = keras.Sequential(
            [keras.Input((6,)), keras.layers.Dense(16, name="up"), keras.layers.Dense(6)]
        )
        self.built = True

    def call(self, x):
        return self.inner(x)

    def train_step(self, data):
        x, y = data
        return self.step(x, y)

    def step(self, x, y):
        loss = keras.ops.mean(keras.ops.square(self(x, training=True) - y))
        self.zero_grad()
        loss.backward()
        gradients = [variable.value.grad for variable in self.trainable_variables]
        self.optimizer.apply(gradients, self.trainable_variables)
        return {"loss": loss}


class Inputs(Pairs):
    """Its step takes inputs alone, as that of an autoencoder."""

    def train_step(self, data):
        return self.step(data, data)


def added():
    """Its loss is that of a layer: it has no targets, and the step of Keras."""
    x = keras.Input((6,))
    inner = keras.layers.Dense(6, name="up", activity_regularizer="l2")
    return keras.Model(x, inner(x), name="net")


CASES = {
    "pairs": (Pairs, (X, Y)),
    "inputs": (Inputs, X),
    "inputs in a tuple": (Inputs, (X,)),
    "added loss": (added, X),
}


def compiled(make):
    def build():
        keras.utils.set_random_seed(3)
        model = make()
        model.compile(keras.optimizers.SGD(0.1))
        return model

    return build


def losses(model, batch):
    inputs = batch if isinstance(batch, tuple) else (batch,)
    return model.fit(*inputs, batch_size=8, epochs=3, shuffle=False, verbose=0).history["loss"]


@pytest.mark.parametrize("name", CASES)
def test_a_model_is_planned_explained_and_trained(name):
    make, batch = CASES[name]
    build = compiled(make)
    (expected,) = run_ranks(lambda rank: losses(build(), batch), 1)
    plan = shardcore.plan(build, devices=2, policy="auto", batch=batch, machine="a100")
    of_rank = sum(array.nbytes for array in (batch if isinstance(batch, tuple) else (batch,))) // 2
    assert shardcore.estimate_memory(plan, build, batch).step["batch"] == of_rank

    def program(rank):
        shardcore.install()
        mesh = keras.distribution.DeviceMesh((2,), ("data",))
        model = shardcore.build(build, "data_parallel", mesh=mesh)
        moved = shardcore.explain(model, batch).collectives
        return losses(model, batch), {collective.kind for collective in moved}

    for found, kinds in run_ranks(program, 2):
        np.testing.assert_allclose(found, expected, rtol=1e-5)
        assert "all_reduce" in kinds


def test_what_a_step_needs_is_said():
    def program(rank):
        shardcore.install()
        model = added()
        model.compile("sgd", "mse")
        for batch in (X, (X,), [X]):
            with pytest.raises(ArgumentProblem, match=r"Expected \(x, y\) or \(x, y, sample"):
                shardcore.explain(model, batch)

        keras.distribution.set_distribution(keras.distribution.DataParallel())
        own = Inputs()
        own.compile("sgd")
        with pytest.raises(CallProblem, match="an own train_step: train one step"):
            shardcore.verify(own, X)
        own.fit(X, verbose=0)
        assert shardcore.verify(own).ok

    run_ranks(program, 1)
