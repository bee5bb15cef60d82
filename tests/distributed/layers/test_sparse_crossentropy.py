"""The loss of sequences: NumPy's numbers in every layout, and no copies of all logits."""

import keras
import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import shardcore
from shardcore.testing import RankFailed, run_ranks

STEPS, CLASSES = 6, 5
RNG = np.random.default_rng(0)


def batch(rows):
    x = RNG.normal(size=(rows, STEPS, CLASSES)).astype("float32")
    return x, RNG.integers(0, CLASSES, (rows, STEPS))


def in_numpy(x, y):
    """The losses, and the gradient of the sum of their squares."""
    powers = np.exp(x.astype("float64"))
    shares = powers / powers.sum(-1, keepdims=True)
    chosen = np.eye(CLASSES)[y]
    losses = -np.log((shares * chosen).sum(-1))
    return losses, 2 * losses[..., None] * (shares - chosen)


def lying(value, mesh, *axes):
    spec = (*axes, *[None] * (value.ndim - len(axes)))
    layout = keras.distribution.TensorLayout(spec, mesh)
    return keras.distribution.distribute_tensor(torch.tensor(value), layout)


LAYOUTS = {
    "rows": ((2, 1), 4, ("data",)),
    "odd rows": ((2, 1), 5, ("data",)),
    "over two axes": ((2, 2), 4, (("data", "model"),)),
    "steps": ((1, 2), 4, (None, "model")),
    "classes": ((1, 2), 4, (None, None, "model")),
    "whole": ((2, 1), 4, ()),
}


@pytest.mark.parametrize("strategy", ["dtensor", "manual"])
@pytest.mark.parametrize("which", LAYOUTS)
def test_losses_of_sequences_are_those_of_numpy(strategy, which):
    shape, rows, axes = LAYOUTS[which]
    x, y = batch(rows)
    losses, gradient = in_numpy(x, y)

    def program(rank):
        shardcore.install(strategy)
        mesh = keras.distribution.DeviceMesh(shape, ("data", "model"))
        layouts = keras.distribution.LayoutMap(mesh)
        parallel = keras.distribution.ModelParallel(layout_map=layouts, batch_dim_name="data")
        keras.distribution.set_distribution(parallel)
        for targets in (y, y[..., None]):
            logits = lying(x, mesh, *axes).detach().requires_grad_()
            found = keras.ops.sparse_categorical_crossentropy(
                lying(targets, mesh, *axes[:1]), logits, from_logits=True
            )
            (found * found).sum().backward()
            to_numpy = keras.ops.convert_to_numpy
            np.testing.assert_allclose(to_numpy(found), losses, rtol=1e-5)
            np.testing.assert_allclose(to_numpy(logits.grad), gradient, rtol=1e-4, atol=1e-6)

    run_ranks(program, int(np.prod(shape)))


class Watch(TorchDispatchMode):
    """Notes the dims of what a softmax is taken of."""

    def __init__(self):
        super().__init__()
        self.dims = []

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        if operator is torch.ops.aten._log_softmax.default:
            self.dims.append((args[0].ndim, args[1] % args[0].ndim))
        return operator(*args, **(kwargs or {}))


def softmaxes(rank, strategy, mesh):
    shardcore.install(strategy)
    if mesh is not None:
        keras.distribution.set_distribution(keras.distribution.DataParallel())
    model = keras.Sequential([keras.Input((STEPS, CLASSES)), keras.layers.Dense(CLASSES)])
    model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    with Watch() as watch:
        model.train_on_batch(*batch(4))
    return watch.dims


@pytest.mark.parametrize(
    ("strategy", "mesh", "dims"),
    [
        ("dtensor", (2,), (2, 1)),
        ("single", None, (2, 1)),
        ("dtensor", None, (3, 1)),  # shardcore is installed, and Keras left as it is
    ],
)
def test_logits_are_not_copied_to_put_the_classes_first(strategy, mesh, dims):
    for found in run_ranks(softmaxes, 2 if mesh else 1, strategy, mesh):
        assert dims in found
        assert set(found) == {dims}


@pytest.mark.parametrize(
    ("shape", "axis", "said"),
    [((4, STEPS + 1), -1, "same shape"), ((4, STEPS), 1, "same shape")],
)
def test_what_keras_refuses_is_refused_by_keras(shape, axis, said):
    def program(rank):
        shardcore.install("single")
        x, _ = batch(4)
        keras.ops.sparse_categorical_crossentropy(np.zeros(shape, "int32"), x, True, axis)

    with pytest.raises(RankFailed, match=said):
        run_ranks(program, 1)


def test_what_torch_ignores_is_ignored():
    def program(rank):
        shardcore.install("single")
        x, y = batch(4)
        y[:, 1:] = -100
        return keras.ops.convert_to_numpy(
            keras.ops.sparse_categorical_crossentropy(y, x, from_logits=True)
        )

    (found,) = run_ranks(program, 1)
    assert (found[:, 0] > 0).all()
    assert (found[:, 1:] == 0).all()
