"""Loops that users write themselves, and the stateless calls: the numbers of one device."""

from functools import cache

import keras
import numpy as np
import pytest
import torch

import shardcore
from shardcore.testing import run_ranks
from tests.distributed.programs import as_arrays, assert_close, distribute, placements

RNG = np.random.default_rng(0)
X = RNG.normal(size=(15, 12)).astype("float32")
Y = keras.utils.to_categorical(RNG.integers(0, 4, 15), 4)
STEPS = (slice(0, 8), slice(8, 14), slice(14, 15))  # even, uneven, fewer rows than ranks
RULES = {
    "first/kernel": (None, "model"),
    "first/bias": ("model",),
    "second/kernel": ("model", None),
}
LOSS = keras.losses.CategoricalCrossentropy(from_logits=True)


def model():
    keras.utils.set_random_seed(1)
    x = keras.Input((12,))
    h = keras.layers.Dense(16, "relu", name="first")(x)
    h = keras.layers.LayerNormalization()(keras.layers.Dropout(0.3)(h))
    return keras.Model(x, keras.layers.Dense(4, name="second")(h))


def batches(sharded):
    """Every process has the global batch, plain; or takes its rows of it, as `fit` does."""
    for step in STEPS:
        batch = X[step], Y[step]
        yield shardcore.ensure_dtensor_input(batch) if sharded else batch


def results(trained, losses, **more):
    for variable in trained.trainable_variables:
        gradient = variable.value.grad
        assert gradient is None or placements(gradient) == placements(variable.value)
    weights = {f"weight {v.path}": v.numpy() for v in trained.weights}
    return as_arrays({"losses": [float(loss.detach()) for loss in losses], **weights, **more})


def keras_optimizer(sharded, optimizer, by_backward):
    trained, losses = model(), []
    parameters = [v.value for v in trained.trainable_variables]
    for x, y in batches(sharded):
        losses.append(LOSS(y, trained(x, training=True)))
        if by_backward:
            trained.zero_grad()
            losses[-1].backward()
            gradients = [parameter.grad for parameter in parameters]
        else:
            gradients = torch.autograd.grad(losses[-1], parameters)
        with torch.no_grad():
            optimizer.apply(gradients, trained.trainable_variables)
    slots = {f"slot {v.path}": v.numpy() for v in optimizer.variables}
    return results(trained, losses, **slots)


def torch_optimizer(sharded, make, clip=None, own=False):
    """A loop of torch's own, over Keras parameters and, if `own`, one that Keras does not know."""
    trained, losses, norms = model(), [], []
    device = trained.trainable_variables[0].value.device
    scale = torch.nn.Parameter(torch.full((4,), 0.5, device=device))
    parameters = [p for p in trained.parameters() if p.requires_grad] + [scale] * own
    optimizer = make(parameters)
    for x, y in batches(sharded):
        outputs = trained(x, training=True)
        losses.append(LOSS(y, outputs * scale + torch.arange(4, device=device) if own else outputs))
        optimizer.zero_grad()
        losses[-1].backward()
        if clip is not None:
            norms.append(float(torch.nn.utils.clip_grad_norm_(parameters, 0.1, foreach=clip)))
        optimizer.step()
    return results(trained, losses, norms=norms, scale=scale)


LOOPS = {
    "Keras Adam": lambda sharded: keras_optimizer(
        sharded, keras.optimizers.Adam(0.01, epsilon=1e-3, global_clipnorm=0.5), True
    ),
    "autograd.grad": lambda sharded: keras_optimizer(
        sharded, keras.optimizers.SGD(0.1, momentum=0.9), False
    ),
    "torch SGD": lambda sharded: torch_optimizer(
        sharded, lambda p: torch.optim.SGD(p, 0.1, 0.9, nesterov=True, foreach=True), clip=True
    ),
    "torch Adam": lambda sharded: torch_optimizer(
        sharded, lambda p: torch.optim.Adam(p, 0.01, eps=1e-3, weight_decay=0.1, foreach=False)
    ),
    "a custom parameter": lambda sharded: torch_optimizer(
        sharded, lambda p: torch.optim.AdamW(p, 0.01, eps=1e-3), clip=False, own=True
    ),
}


def stateless(sharded):
    """Training as on JAX: state in, state out. The model is not changed.

    Its values are copied, as the optimizers of Keras on torch write into what they are given.
    """
    trained, losses = model(), []
    optimizer, metric = keras.optimizers.Adam(0.01, epsilon=1e-3), keras.metrics.AUC(20)
    optimizer.build(trained.trainable_variables)
    before = trained.get_weights()
    state = [[v.value for v in each] for each in (
        trained.trainable_variables, trained.non_trainable_variables, optimizer.variables,
        metric.variables,
    )]  # fmt: skip
    weights, others, slots, counts = state
    for x, y in batches(sharded):
        weights = [weight.detach().clone().requires_grad_() for weight in weights]
        outputs, others = trained.stateless_call(weights, others, x, training=True)
        losses.append(LOSS(y, outputs))
        gradients = torch.autograd.grad(losses[-1], weights)
        with torch.no_grad():
            slots, weights = optimizer.stateless_apply(slots, gradients, weights)[::-1]
        counts = metric.stateless_update_state(counts, y, torch.softmax(outputs.detach(), -1))
    for now, then in zip(trained.get_weights(), before, strict=True):
        np.testing.assert_array_equal(now, then)
    for variable, weight in zip(trained.trainable_variables, weights, strict=True):
        assert placements(weight) == placements(variable.value)
    auc = metric.stateless_result(counts)
    return results(trained, losses, now=weights, slots=slots, others=others, auc=auc)


def stateless_layer(sharded):
    """The state may be given whole: it counts as replicated."""
    layer = keras.layers.Dense(16, name="first")
    keras.utils.set_random_seed(1)
    layer.build((None, 12))
    x, _ = next(batches(sharded))
    whole = [torch.as_tensor(v.numpy()) for v in layer.trainable_variables]
    return as_arrays({"outputs": layer.stateless_call(whole, [], x)[0]})


PROGRAMS = LOOPS | {"stateless": stateless, "stateless layer": stateless_layer}


def run(rank, mesh, sharded):
    if mesh:
        distribute(mesh, RULES)
    found = {}
    for name, program in PROGRAMS.items():
        values = program(sharded)
        leaves = keras.tree.flatten_with_path(values)
        found |= {f"{name}: {path}": leaf for path, leaf in leaves}
    return found


@cache
def one_device():
    return run_ranks(run, 1, None, False)[0]


@pytest.mark.parametrize(("mesh", "sharded"), [((2, 1), True), ((1, 2), False)])
def test_a_loop_gives_the_numbers_of_one_device(mesh, sharded):
    results = run_ranks(run, mesh[0] * mesh[1], mesh, sharded)
    assert_close(results, one_device(), atol=2e-5)
