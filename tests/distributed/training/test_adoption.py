"""Models, optimizers and metrics of before the distribution, laid out at their first use."""

import keras
import numpy as np
import pytest
import torch

import shardcore
from shardcore.domain.errors import CallProblem, RankMismatchError
from shardcore.testing import run_ranks
from tests.distributed.programs import (
    assert_close,
    assert_fails_everywhere,
    distribute,
    local,
    placements,
)

RULES = {".*hidden/kernel": (None, "model"), ".*hidden/bias": ("model",)}
DRAWN = np.random.default_rng(0)
X = DRAWN.normal(size=(8, 6)).astype("float32")
Y = DRAWN.normal(size=(8, 2)).astype("float32")
OPTIMIZERS = {
    "adam": lambda: keras.optimizers.Adam(0.01, epsilon=1e-3),
    "momentum": lambda: keras.optimizers.SGD(0.05, momentum=0.9),
    "rmsprop": lambda: keras.optimizers.RMSprop(0.01, epsilon=1e-3),
}


def mlp():
    keras.utils.set_random_seed(1)
    layers = [keras.layers.Dense(4, activation="tanh", name="hidden"), keras.layers.Dropout(0.2)]
    return keras.Sequential([keras.Input((6,)), *layers, keras.layers.Dense(2, name="out")])


def compiled(optimizer):
    model = mlp()
    model.compile(OPTIMIZERS[optimizer](), "mse", metrics=["mae"], jit_compile=False)
    return model


def fitted(model, epochs=2):
    return model.fit(X, Y, batch_size=4, epochs=epochs, shuffle=False, verbose=0).history


def weights_of(model):
    return {variable.path: variable.numpy() for variable in model.variables}


def layouts_of(variables):
    return {v.path: (placements(v._value), local(v).shape) for v in variables}


@pytest.mark.parametrize("mesh", [(2, 1), (1, 2)])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_model_that_was_trained_on_one_device_goes_on_in_shards(optimizer, mesh):
    def program(rank, mesh):
        model = compiled(optimizer)
        fitted(model, epochs=1)
        if mesh:
            distribute(mesh, RULES)
        history = fitted(model)
        found = [v for v in model.optimizer.variables if "hidden_kernel" in v.path] if mesh else []
        return history, weights_of(model), layouts_of([*model.weights, *found] if mesh else [])

    history, weights, _ = run_ranks(program, 1, None)[0]
    for other, found, layouts in run_ranks(program, 2, mesh):
        assert_close([other], history)
        assert_close([found], weights)
        placed = ("R S(1)", (6, 4 // mesh[1]))
        kernels = {
            path: each for path, each in layouts.items() if "kernel" in path and "out" not in path
        }
        assert len(kernels) > 1
        assert set(kernels.values()) == {placed}


@pytest.mark.parametrize("steps_before", [0, 1])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_loop_takes_a_model_an_optimizer_and_a_metric_of_before(optimizer, steps_before):
    def program(rank, mesh):
        model, update = mlp(), OPTIMIZERS[optimizer]()
        mean, loss = keras.metrics.Mean(), keras.losses.MeanSquaredError()
        for number in range(3):
            if mesh and number == steps_before:
                distribute(mesh, RULES)
            value = loss(torch.as_tensor(Y), model(torch.as_tensor(X), training=True))
            model.zero_grad()
            value.backward()
            trained = model.trainable_weights
            with torch.no_grad():
                update.apply([each.value.grad for each in trained], trained)
            mean.update_state(value.detach())
        shape = local(model.weights[0]).shape if mesh else ()
        return weights_of(model), float(mean.result()), shape

    weights, mean, _ = run_ranks(program, 1, None)[0]
    ways = [*run_ranks(program, 2, (2, 1)), *run_ranks(program, 2, (1, 2))]
    assert [each[2] for each in ways] == [(6, 4), (6, 4), (6, 2), (6, 2)]
    for found, result, _ in ways:
        assert_close([found], weights)
        assert result == pytest.approx(mean, rel=1e-5)


def test_a_layer_that_is_called_alone_keeps_its_shard_and_no_full_tensor():
    def program(rank):
        keras.utils.set_random_seed(2)
        layer = keras.layers.Dense(4, name="hidden")
        layer.build((None, 6))
        before = layer.get_weights()
        distribute((1, 2), RULES)
        outputs = keras.ops.convert_to_numpy(layer(X))
        sizes = sorted(each.to_local().numel() for each in layer.parameters())
        return outputs - (X @ before[0] + before[1]), layouts_of(layer.weights), sizes

    for difference, layouts, sizes in run_ranks(program, 2):
        np.testing.assert_allclose(difference, 0, atol=1e-5)
        assert layouts == {"hidden/kernel": ("R S(1)", (6, 2)), "hidden/bias": ("R S(0)", (2,))}
        assert sizes == [2, 12]


def test_torch_modules_and_their_buffers_of_before_are_laid_out():
    def module():
        torch.manual_seed(3)
        inner = torch.nn.Sequential(torch.nn.Linear(6, 4), torch.nn.BatchNorm1d(4))
        wrapper = keras.layers.TorchModuleWrapper(inner, output_shape=(None, 4))
        model = keras.Sequential([keras.Input((6,)), wrapper, keras.layers.Dense(2)])
        model.compile(keras.optimizers.SGD(0.1), "mse", jit_compile=False)
        return model, inner

    def program(rank, mesh):
        keras.utils.set_random_seed(3)
        model, inner = module()
        if mesh:
            distribute(mesh)
        fitted(model)
        return weights_of(model), inner[1].running_mean.detach().numpy(force=True)

    weights, mean = run_ranks(program, 1, None)[0]
    for found, running in run_ranks(program, 2, (2, 1)):
        assert_close([found], weights)
        np.testing.assert_allclose(running, mean, rtol=1e-5, atol=1e-6)


def test_a_model_moves_to_another_mesh_with_its_optimizer():
    def program(rank, moves):
        model = compiled("adam")
        if moves:
            distribute((2, 1), RULES)
        fitted(model, epochs=1)
        if moves:
            distribute((1, 2), RULES)
            assert shardcore.distribute_model(model) is model
        fitted(model)
        return weights_of(model), placements(model.weights[0]._value) if moves else ""

    weights, _ = run_ranks(program, 1, False)[0]
    for found, placed in run_ranks(program, 2, True):
        assert_close([found], weights)
        assert placed == "R S(1)"


def test_a_model_of_another_mesh_is_refused_with_the_remedy():
    def program(rank):
        distribute((2, 1), RULES)
        model = compiled("adam")
        fitted(model)
        distribute((1, 2), RULES)
        fitted(model)

    assert_fails_everywhere(program, 2, error=CallProblem, match=r"distribute_model\(model\)")


def test_values_that_differ_between_ranks_are_refused():
    def program(rank):
        keras.utils.set_random_seed(rank)
        layer = keras.layers.Dense(4, name="hidden")
        layer.build((None, 6))
        distribute((2, 1))
        layer(X)

    assert_fails_everywhere(
        program, 2, error=RankMismatchError, match=r"variable 0 \(hidden/kernel\)"
    )


def test_verify_and_explain_lay_out_what_they_look_at():
    def program(rank):
        model = compiled("momentum")
        distribute((1, 2), RULES)
        explained = shardcore.explain(model, (X, Y))
        report = shardcore.verify(model)
        return len(explained.collectives), [each.stored for each in report.variables]

    for collectives, stored in run_ranks(program, 2):
        assert collectives > 0
        assert stored
        assert all(stored)
