"""Adam's update is one operator, and gives what that of Keras gives."""

import keras
import numpy as np
import pytest
import torch

import shardcore
from shardcore.binding.training.loops import COMPARED
from shardcore.testing import count_collectives, run_ranks

X = np.random.default_rng(0).standard_normal((32, 8)).astype("float32")
COLUMNS_THEN_ROWS = {"first/kernel": (None, "model"), "last/kernel": ("model", None)}
LAYOUTS = {
    "one device": ("single", (), {}),
    "data parallel": ("dtensor", (2, 1), {}),
    "tensor parallel": ("dtensor", (1, 2), COLUMNS_THEN_ROWS),
    "by hand": ("manual", (1, 2), COLUMNS_THEN_ROWS),
    "columns over the batch axis": ("dtensor", (2, 1), {".*kernel": (None, "data")}),
}
OPTIMIZERS = {
    "Adam": lambda: keras.optimizers.Adam(0.05),
    "largest moments": lambda: keras.optimizers.Adam(0.05, amsgrad=True),
    "AdamW": lambda: keras.optimizers.AdamW(0.05, weight_decay=0.1),
    "schedule": lambda: keras.optimizers.Adam(keras.optimizers.schedules.CosineDecay(0.1, 9)),
    "two other moments": lambda: keras.optimizers.Adam(0.05, 0.7, 0.8, 1e-3),
}


def distribute(shape, rules):
    mesh = keras.distribution.DeviceMesh(shape, ("data", "model"))
    layouts = keras.distribution.LayoutMap(mesh)
    for path, axes in rules.items():
        layouts[path] = axes
    keras.distribution.set_distribution(
        keras.distribution.ModelParallel(layout_map=layouts, batch_dim_name="data")
    )


def trained(_rank, optimizer, strategy, shape, rules, jit_compile):
    if strategy:
        shardcore.install(strategy)
    if shape:
        distribute(shape, rules)
    keras.utils.set_random_seed(0)
    hidden = keras.layers.Dense(12, activation="tanh", name="first")
    model = keras.Sequential([keras.Input((8,)), hidden, keras.layers.Dense(4, name="last")])
    model.compile(OPTIMIZERS[optimizer](), "mse", jit_compile=jit_compile)
    model.fit(X, X[:, :4], batch_size=8, epochs=3, verbose=0, shuffle=False)
    return model.get_weights()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_it_gives_what_keras_gives(layout):
    strategy, shape, rules = LAYOUTS[layout]
    for optimizer in OPTIMIZERS if layout == "one device" else ["Adam"]:
        (expected,) = run_ranks(trained, 1, optimizer, "", (), {}, False)
        for jit_compile in (False, "auto"):
            ranks = 2 if shape else 1
            for found in run_ranks(trained, ranks, optimizer, strategy, shape, rules, jit_compile):
                for one, other in zip(found, expected, strict=True):
                    np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)


def updated(_rank, strategy, transposed):
    """A variable after an update, and the operators on lists that made it."""
    from shardcore.adapters.torch_private import OperatorListener

    if strategy:
        shardcore.install(strategy)
    value = torch.arange(6.0).reshape(2, 3)
    variable = keras.Variable(value.T if transposed else value)
    optimizer, gradient = keras.optimizers.Adam(0.5), torch.arange(6.0).reshape(variable.shape)
    optimizer.build([variable])
    names = []
    listener = OperatorListener(
        before=lambda *_: (), after=lambda called, *_: names.append(called.__name__)
    )
    with listener:
        optimizer.apply([gradient])
    lists = [name for name in names if name.startswith(("_foreach_sqrt", "_fused"))]
    return variable.numpy(), lists


def test_it_is_one_operator_where_all_tensors_lie_plainly():
    for transposed, operators in (
        (False, ["_fused_adam_.tensor_lr"]),
        (True, ["_foreach_sqrt.default"]),
    ):
        ((expected, _),) = run_ranks(updated, 1, "", transposed)
        ((found, lists),) = run_ranks(updated, 1, "single", transposed)
        np.testing.assert_allclose(found, expected, rtol=1e-6)
        assert lists == operators


def of_a_whole_gradient(_rank, strategy):
    """A weight sharded by columns after an update by a gradient that every rank has whole."""
    if strategy:
        shardcore.install(strategy)
        distribute((1, 2), {".*kernel": (None, "model")})
    layer = keras.layers.Dense(4)
    layer.build((3,))
    layer.kernel.assign(np.ones((3, 4), "float32"))
    optimizer = keras.optimizers.Adam(0.5, epsilon=1.0)
    optimizer.build([layer.kernel])
    optimizer.apply([torch.arange(12.0).reshape(3, 4)])
    return keras.ops.convert_to_numpy(layer.kernel)


@pytest.mark.parametrize("strategy", ["dtensor", "manual"])
def test_a_part_of_a_gradient_need_not_lie_as_the_weight(strategy):
    (expected,) = run_ranks(of_a_whole_gradient, 1, "")
    for found in run_ranks(of_a_whole_gradient, 2, strategy):
        np.testing.assert_allclose(found, expected, rtol=1e-6)


def sent_by_torch(rank):
    """The collectives of a fused optimizer of torch after the first updates, and the weight."""
    shardcore.install()
    distribute((1, 2), {".*kernel": (None, "model")})
    layer = keras.layers.Dense(4)
    layer.build((3,))
    layer.kernel.assign(np.ones((3, 4), "float32"))
    kernel = layer.kernel.value
    (kernel * torch.arange(12.0).reshape(3, 4)).sum().backward()
    optimizer = torch.optim.Adam([kernel], 0.5, fused=True)
    for _ in range(COMPARED):  # the updates before which ranks compare their inputs
        optimizer.step()
    with count_collectives() as traffic:
        optimizer.step()
    return traffic.calls.total(), keras.ops.convert_to_numpy(layer.kernel)


def test_a_fused_optimizer_of_torch_updates_shards():
    for sent, kernel in run_ranks(sent_by_torch, 2):
        assert sent == 0
        np.testing.assert_allclose(kernel.ravel(), [1.0, *[-1.0] * 11], rtol=1e-5)


def with_moments_sharded_further(_rank):
    """A replicated parameter whose moments are sharded: torch's fused update, and the numbers."""
    shardcore.install("dtensor")
    distribute((2, 1), {})
    parameter = torch.nn.Parameter(shardcore.distribute_tensor(torch.ones(4, 3), (None, None)))
    optimizer = torch.optim.Adam([parameter], lr=0.1, fused=True)
    parameter.grad = shardcore.distribute_tensor(torch.arange(12.0).reshape(4, 3), (None, None))
    moments = {
        name: shardcore.distribute_tensor(torch.full((4, 3), 0.5), ("data", None))
        for name in ("exp_avg", "exp_avg_sq")
    }
    optimizer.state[parameter] = {"step": torch.tensor(3.0), **moments}
    optimizer.step()
    state = optimizer.state[parameter]
    return [each.full_tensor().detach().numpy() for each in (parameter, *map(state.get, moments))]


def test_moments_that_are_sharded_further_are_updated_too():
    parameter = torch.nn.Parameter(torch.ones(4, 3))
    optimizer = torch.optim.Adam([parameter], lr=0.1)
    parameter.grad = torch.arange(12.0).reshape(4, 3)
    state = {name: torch.full((4, 3), 0.5) for name in ("exp_avg", "exp_avg_sq")}
    optimizer.state[parameter] = {"step": torch.tensor(3.0), **state}
    optimizer.step()
    expected = [each.detach().numpy() for each in (parameter, *state.values())]
    for found in run_ranks(with_moments_sharded_further, 2):
        for one, other in zip(found, expected, strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-5)
