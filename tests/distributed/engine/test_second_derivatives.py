"""A gradient of a gradient is that of one device: penalties of slopes, second derivatives."""

import keras
import numpy as np
import pytest
import torch

import shardcore
from shardcore.testing import run_ranks
from tests.distributed.programs import DEVICE, as_arrays, assert_close, distribute

X = np.random.default_rng(0).normal(size=(5, 2)).astype("float32")
COLUMNS = {".*first/kernel": (None, "model"), ".*first/bias": ("model",)}
ROWS = {".*second/kernel": ("model", None)}


def model():
    keras.utils.set_random_seed(1)
    layers = keras.layers
    return keras.Sequential(
        [
            keras.Input((2,)),
            layers.Dense(8, "tanh", name="first"),
            layers.Dense(6, "tanh", name="second"),
            layers.Dense(1, name="head"),
        ]
    )


def inputs(mesh):
    x = torch.as_tensor(X, device=DEVICE)
    return shardcore.ensure_dtensor_input(x) if mesh else x


def bend(net, mesh):
    """The loss of a physical equation, of which a second derivative is part."""
    at = (inputs(mesh) + 0.0).requires_grad_()
    (slope,) = torch.autograd.grad(net(at).sum(), [at], create_graph=True)
    (bent,) = torch.autograd.grad(slope[:, 0].sum(), [at], create_graph=True)
    return keras.ops.mean(keras.ops.square(slope[:, 1] - 0.1 * bent[:, 0]))


def steepness(net, mesh):
    """The square of the gradient of each weight, which the pass has left in `grad`."""
    keras.ops.mean(keras.ops.square(net(inputs(mesh)))).backward(create_graph=True)
    kernels = [v.value for v in net.trainable_variables if v.path.endswith("kernel")]
    return sum(keras.ops.sum(keras.ops.square(kernel.grad)) for kernel in kernels)


def of_edges(net, mesh):
    """A penalty of slopes through a full tensor, and through one that is sharded again."""
    at = inputs(mesh).clone().requires_grad_()
    hidden = net.layers[0](at)
    if mesh:
        hidden = hidden.full_tensor() ** 2
        device_mesh = keras.distribution.distribution().device_mesh
        layout = keras.distribution.TensorLayout((None, "model"), device_mesh)
        hidden = keras.distribution.distribute_tensor(hidden, layout)
    else:
        hidden = hidden**2
    (slope,) = torch.autograd.grad((hidden**2).sum(), [at], create_graph=True)
    return keras.ops.mean(keras.ops.square(slope))


@pytest.mark.filterwarnings("ignore:Using backward\\(\\) with create_graph=True")
@pytest.mark.parametrize("strategy", ["dtensor", "manual"])
@pytest.mark.parametrize("loss", [bend, steepness, of_edges], ids=lambda loss: loss.__name__)
def test_gradients_of_a_gradient_are_those_of_one_device(loss, strategy):
    def program(rank, mesh, rules):
        if mesh:
            distribute(mesh, rules, strategy=strategy)
        net = model()
        total = loss(net, mesh)
        weights = {v.path: v.value for v in net.trainable_variables}
        found = torch.autograd.grad(total, list(weights.values()), allow_unused=True)
        slopes = {name: each for name, each in zip(weights, found, strict=True) if each is not None}
        return as_arrays({"loss": total.detach(), **slopes})

    (reference,) = run_ranks(program, 1, None, {})
    assert len(reference) > 2
    for mesh, rules in (((1, 2), COLUMNS), ((1, 2), COLUMNS | ROWS), ((2, 2), COLUMNS | ROWS)):
        assert_close(run_ranks(program, mesh[0] * mesh[1], mesh, rules), reference)
