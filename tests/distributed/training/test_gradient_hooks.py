"""Gradients that a user's own hook changes before they are reduced together."""

import keras
import torch

import shardcore
from shardcore.testing import run_ranks
from tests.distributed.programs import as_arrays, assert_close, distribute

X = torch.arange(24.0).reshape(6, 4)


def gradients(rank, mesh, change):
    if mesh:
        distribute(mesh)
    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3), keras.layers.Dense(2)])
    for variable in model.trainable_variables:
        variable.value.register_post_accumulate_grad_hook(change)
    x = X
    if mesh:
        x = shardcore.distribute_tensor(X, ("data", None))
    model(x).sum().backward()
    grads = {v.path: v.value.grad for v in model.trainable_variables}
    return as_arrays({path: grad for path, grad in grads.items() if grad is not None})


def clamp(parameter):
    if parameter.ndim == 1:
        parameter.grad.clamp_(-1.0, 1.0)


def scale(parameter):
    parameter.grad /= 4


def drop_some(parameter):
    if parameter.ndim == 2:
        parameter.grad = None


def test_gradient_hooks_give_the_gradients_of_one_device():
    for change in (clamp, scale, drop_some):
        (reference,) = run_ranks(gradients, 1, None, change)
        assert_close(run_ranks(gradients, 2, (2, 1), change), reference, atol=1e-4)
