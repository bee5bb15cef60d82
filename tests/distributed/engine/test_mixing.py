"""Plain tensors meet sharded ones, forward, backward and in the update: one device's numbers."""

import keras
import numpy as np
import pytest
import torch

import shardcore
from shardcore.adapters.engine import writes
from shardcore.testing import run_ranks
from tests.distributed.programs import as_arrays, assert_close, distribute, local_shapes, placements

RNG = np.random.default_rng(0)
X = RNG.normal(size=(6, 4)).astype("float32")
Y = RNG.normal(size=(6, 4)).astype("float32")
RULES = {"scaled/kernel": (None, "model"), "head/kernel": ("model", None)}


class Scaled(keras.layers.Layer):
    """A layer with a plain constant, read in the forward pass and in the backward pass."""

    def build(self, shape):
        self.kernel = self.add_weight(shape=(shape[-1], 4), name="kernel")
        self.constant = torch.linspace(0.5, 1.5, 4)

    def call(self, x):
        return _Clipped.apply(keras.ops.matmul(x, self.kernel) * self.constant, self.constant)


class _Clipped(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, scale):
        ctx.save_for_backward(scale)
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        (scale,) = ctx.saved_tensors
        return gradient * scale, None


def build():
    keras.utils.set_random_seed(1)
    x = keras.Input((4,))
    h = keras.layers.Activation("tanh")(Scaled(name="scaled")(x))
    model = keras.Model(x, keras.layers.Dense(4, name="head")(h))
    model.compile(keras.optimizers.SGD(1.0, momentum=0.5), "mse")
    model.optimizer.learning_rate = torch.tensor(0.1)
    return model


def weights(model):
    return {variable.path: variable.numpy() for variable in model.variables}


def by_fit(model):
    model.fit(X, Y, batch_size=4, epochs=2, shuffle=False, verbose=0)
    return weights(model)


def by_hand(model):
    """A loop of the user's own, on plain tensors."""
    x, y = torch.as_tensor(X), torch.as_tensor(Y)
    for _ in range(2):
        model.zero_grad()
        loss = keras.ops.mean(keras.ops.square(model(x, training=True) - y))
        loss.backward()
        variables = model.trainable_variables
        model.optimizer.apply([v.value.grad for v in variables], variables)
    return {"loss": float(loss.detach()), **weights(model)}


def by_autograd(model):
    x, y = shardcore.ensure_dtensor_input((X, Y)) if is_distributed() else map(torch.tensor, (X, Y))
    loss = keras.ops.mean(keras.ops.square(model(x) - y))
    variables = model.trainable_variables
    gradients = torch.autograd.grad(loss, [v.value for v in variables])
    with torch.no_grad():
        model.optimizer.apply(list(gradients), variables)
    return {**as_arrays({str(i): g for i, g in enumerate(gradients)}), **weights(model)}


def by_plain_gradients(model):
    variables = model.trainable_variables
    for step in range(2):
        gradients = [torch.full(tuple(v.shape), step + 1.0) for v in variables]
        with torch.no_grad():
            model.optimizer.apply(gradients, variables)
    return weights(model)


def is_distributed():
    return keras.distribution.distribution() is not None


WAYS = [by_fit, by_hand, by_autograd, by_plain_gradients]


def test_training_by_every_way_is_that_of_one_device():
    def program(rank, mesh):
        if mesh:
            distribute(mesh, RULES)
        models = [build() for _ in WAYS]
        values = [way(model) for way, model in zip(WAYS, models, strict=True)]
        stored = local_shapes(models[0].variables) if mesh else None
        named = zip(WAYS, values, strict=True)
        return {f"{w.__name__} {k}": v for w, each in named for k, v in each.items()}, stored

    ((reference, _),) = run_ranks(program, 1, None)
    results = run_ranks(program, 4, (2, 2))
    assert_close([values for values, _ in results], reference)
    assert {stored["scaled/kernel"] for _, stored in results} == {(4, 2)}


def test_a_pending_sum_is_read_as_the_global_value():
    def program(rank):
        distribute((2, 2))
        rows = shardcore.ensure_dtensor_input(X)
        pending = rows.sum()
        return (
            placements(pending),
            float(pending),
            pending.item(),
            bool(pending > 1e9),
            int(pending),
        )

    total = X.sum(dtype="float64")
    for placed, number, item, large, whole in run_ranks(program, 4):
        assert "P(sum)" in placed
        assert (number, item) == pytest.approx((total, total), abs=1e-5)
        assert (large, whole) == (False, int(total))


def test_an_operator_without_a_rule_is_right_and_warned_of_once():
    image = RNG.normal(size=(4, 2, 5, 5)).astype("float32")

    def program(rank, mesh):
        if mesh:
            distribute(mesh)
        warned = []
        writes.logger.warning = lambda message, operator, *rest: warned.append(operator)
        x = torch.as_tensor(image)
        x = shardcore.ensure_dtensor_input(x) if mesh else x
        x.requires_grad_()
        for _ in range(2):
            y = torch.nn.functional.glu(x, dim=1)
            (gradient,) = torch.autograd.grad((y * y).sum(), x)
        return as_arrays({"y": y, "gradient": gradient}), list(map(str, warned))

    ((reference, _),) = run_ranks(program, 1, None)
    results = run_ranks(program, 4, (2, 2))
    assert_close([values for values, _ in results], reference)
    for _, warned in results:
        assert "aten.glu_backward.default" in warned
        assert len(warned) == len(set(warned))
