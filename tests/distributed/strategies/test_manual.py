"""Strategy `manual`: what a rank stores, what it gathers and when, and what it reduces together.

The tests of gathering ask for `weights="gather"`: it is no default.
"""

import gc
from concurrent.futures import ThreadPoolExecutor

import keras
import numpy as np
import pytest
import torch

import shardcore
from shardcore.adapters.engine.redistributed import UnshardedWeights
from shardcore.adapters.engine.tensor_classes.dtensors import ShardedDTensor
from shardcore.adapters.engine.tensor_classes.local_shards import LocalShardTensor
from shardcore.domain.errors import MeshError, StrategyError
from shardcore.domain.steps.held_weights import WeightSize
from shardcore.testing import count_collectives, run_ranks
from tests import warm
from tests.fallbacks import fallbacks, forget_fallbacks

ROWS = np.random.default_rng(0).normal(size=(12, 6)).astype("float32")
TARGETS = np.random.default_rng(1).normal(size=(12, 3)).astype("float32")


GATHER = {"weights": "gather"}


def distribute(shape, rules, strategy="manual", **options):
    shardcore.install(strategy, **options)
    mesh = keras.distribution.DeviceMesh(shape, ("data", "model"))
    layout_map = keras.distribution.LayoutMap(mesh)
    for path, spec in rules.items():
        layout_map[path] = spec
    keras.distribution.set_distribution(
        keras.distribution.ModelParallel(layout_map=layout_map, batch_dim_name="data")
    )


def perceptron():
    keras.utils.set_random_seed(3)
    layers = [keras.layers.Dense(8, activation="tanh"), keras.layers.Dense(3)]
    model = keras.Sequential([keras.Input((6,)), *layers], name="net")
    model.compile("adam", "mse")
    return model


def test_a_rank_stores_its_slice_and_nothing_else():
    def program(rank):
        distribute((2, 2), {"net/dense/kernel": ("data", "model"), "net/dense/bias": ("model",)})
        model = perceptron()
        model.train_on_batch(ROWS, TARGETS)
        kept = [*model.variables, *model.optimizer.variables]
        stored = {
            v.path: v._value.part.untyped_storage().nbytes() / v._value.part.element_size()
            for v in kept
            if v.path.endswith(("dense/kernel", "dense/bias", "dense_kernel_momentum"))
        }
        kernel = model.layers[0].kernel._value
        layout = kernel.mesh_layout
        starts = tuple(each.start for each in layout.slices(kernel.shape, rank))
        where = tuple(kernel.shape), starts, str(layout)
        return stored, where, all(isinstance(v._value, LocalShardTensor) for v in kept)

    for rank, (stored, where, sliced) in enumerate(run_ranks(program, 4)):
        assert sliced
        assert stored == {
            "net/dense/kernel": 3 * 4,
            "net/dense/bias": 4,
            "adam/net_dense_kernel_momentum": 3 * 4,
        }
        assert where == ((6, 8), (3 * (rank // 2), 4 * (rank % 2)), "('data', 'model')")


def engine_of(model):
    return model.trainable_variables[0]._value.engine


def hold(model, held):
    """Lets the engine of a model hold `held` bytes of all-gathered weights."""
    engine_of(model).unsharded = UnshardedWeights((WeightSize(held, held),))


def calls_of_a_step(rank, shape, rules, options, held=None):
    """The collectives of a step that keeps up to `held` bytes of all-gathered weights.

    The optimizer is left out.
    """
    distribute(shape, rules, **options)
    model = perceptron()
    model.train_on_batch(ROWS, TARGETS)
    if held is not None:
        hold(model, held)
    model.zero_grad()
    with count_collectives() as traffic:
        x, y = (torch.tensor(each) for each in (ROWS, TARGETS))
        rows = shardcore.distribute_tensor(x, ("data", None))
        wanted = shardcore.distribute_tensor(y, ("data", None))
        loss = torch.mean((model(rows) - wanted) ** 2)
        loss.backward()
    return dict(traffic.calls), dict(traffic.operand_bytes)


def test_the_gradients_of_replicated_variables_are_reduced_together():
    ((calls, sent), _) = run_ranks(calls_of_a_step, 2, (2, 1), {}, {})
    assert calls == {"all_reduce": 1}
    assert sent == {"all_reduce": 4 * (6 * 8 + 8 + 8 * 3 + 3)}


def test_a_backward_pass_that_failed_leaves_nothing_to_the_next():
    def program(rank):
        distribute((2, 1), {})
        model = perceptron()
        x = shardcore.distribute_tensor(torch.tensor(ROWS), ("data", None))

        def fail(_gradient):
            raise RuntimeError("on purpose")

        first = model.layers[0].bias._value
        handle = first.register_hook(fail)
        with pytest.raises(RuntimeError, match="on purpose"):
            model(x).sum().backward()
        handle.remove()
        model.zero_grad()
        model(x).sum().backward()
        return [v._value.grad.mesh_layout.partial for v in model.trainable_variables]

    assert run_ranks(program, 2) == [[()] * 4] * 2


def test_a_backward_pass_on_a_thread_without_a_distribution_is_refused():
    def program(rank):
        distribute((2, 1), {})
        model = perceptron()
        x = shardcore.distribute_tensor(torch.tensor(ROWS), ("data", None))
        loss = model(x).sum()
        with ThreadPoolExecutor(1) as pool, pytest.raises(StrategyError, match="collective"):
            pool.submit(loss.backward).result(timeout=20)

    run_ranks(program, 2)


KERNEL = 4 * 8 * 3  # the bytes of the kernel of "dense_1"


@pytest.mark.parametrize("weights", ["compute", "gather"])
@pytest.mark.parametrize("held", [None, 0])
def test_a_variable_sharded_over_the_batch_axis_is_gathered_for_each_pass(weights, held):
    """Its own gradient is scattered.

    The gradient of its input needs it too, in the backward pass: it is gathered again then, and not
    held from the forward pass on. It follows the rows, which stay, whatever `weights` is.
    """
    gathers = 2
    rules = {"net/dense_1/kernel": ("data", None)}
    options = {"weights": weights}
    ((calls, sent), _) = run_ranks(calls_of_a_step, 2, (2, 1), rules, options, held)
    assert calls == {"all_reduce": 1, "all_gather": gathers, "reduce_scatter": 1}
    assert sent["all_gather"] == gathers * KERNEL / 2
    assert sent["reduce_scatter"] == KERNEL


def test_a_weight_gathered_per_step_has_no_size_limit():
    def program(rank):
        distribute((2, 1), {"net/dense_1/kernel": ("data", None)}, gathered="per_step")
        return engine_of(perceptron()).unsharded.holds_steps

    assert run_ranks(program, 2) == [True] * 2
    rules = {"net/dense_1/kernel": ("data", None)}
    ((calls, _), _) = run_ranks(calls_of_a_step, 2, (2, 1), rules, {"gathered": "per_step"})
    assert calls == {"all_reduce": 1, "all_gather": 1, "reduce_scatter": 1}


def test_a_gathered_weight_is_up_to_date_and_is_freed_with_its_step():
    def program(rank, ways):
        losses = {}
        for how in ways:
            if how != "one device":
                distribute((2, 1), {".*kernel": ("data", None)}, gathered=how)
            model = perceptron()
            losses[how] = [float(model.train_on_batch(ROWS, TARGETS)) for _ in range(3)]
            if how != "one device":
                assert not engine_of(model).unsharded.bytes
                shardcore.uninstall()
        return losses

    ((one),) = run_ranks(program, 1, ["one device"])
    for found in run_ranks(program, 2, ["per_use", "per_step"]):
        assert found["per_use"] == pytest.approx(one["one device"], abs=1e-6)
        assert found["per_step"] == pytest.approx(one["one device"], abs=1e-6)


@pytest.mark.parametrize("strategy", ["manual", "dtensor"])
def test_another_value_of_an_option_is_refused(strategy):
    def program(rank):
        for option, expected in {
            "gathered": "takes gathered='per_use' or gathered='per_step', got ",
            "weights": "takes weights='compute' or weights='gather', got ",
        }.items():
            with pytest.raises(StrategyError, match=f"{expected}'forever'"):
                shardcore.install(strategy, **{option: "forever"})
        with pytest.raises(StrategyError, match=f"'{strategy}' has no option 'lifetime'"):
            shardcore.install(strategy, lifetime="per_use")
        for links in (None, shardcore.Link(), {"data": (1e-5, 1e9)}):
            with pytest.raises(StrategyError, match=r"takes links=\{str: Link\(...\)\}, got"):
                shardcore.install(strategy, links=links)

    run_ranks(program, 2)


@pytest.mark.parametrize("strategy", ["manual", "dtensor"])
def test_ranks_with_different_options_get_an_error_on_all_ranks(strategy):
    """They would plan other collectives."""

    def program(rank):
        options = {"links": {"model": shardcore.Link(latency=1.0)}} if rank else {}
        with pytest.raises(StrategyError, match=r"and rank 1 with .*latency=1.0.* on every rank"):
            distribute((1, 2), {}, strategy, **options)

    run_ranks(program, 2)


def test_a_link_of_an_axis_that_is_not_there_is_refused():
    def program(rank):
        with pytest.raises(MeshError, match=r"\['modle'\], but the mesh has"):
            distribute((1, 2), {}, links={"modle": shardcore.Link()})

    run_ranks(program, 2)


COLUMN = {"net/dense_1/kernel": (None, "model")}


@pytest.mark.parametrize("held", [None, 0])
def test_a_gathered_variable_of_the_model_axis_gets_its_slice_of_the_gradient(held):
    """Each rank computes all of it: the forward pass needs the kernel, and the backward pass."""
    ((calls, _), _) = run_ranks(calls_of_a_step, 2, (1, 2), COLUMN, GATHER, held)
    assert calls == {"all_gather": 2}


def test_a_variable_of_the_model_axis_is_computed_with_by_default():
    """Nothing gathers it. The bias, which is whole, gathers its gradient; that of the input is
    summed: each rank has the part of its columns.
    """
    ((calls, sent), _) = run_ranks(calls_of_a_step, 2, (1, 2), COLUMN, {}, 0)
    assert calls == {"all_gather": 1, "all_reduce": 1}
    assert sent["all_reduce"] == ROWS.shape[0] * 8 * 4


MEGATRON = {
    "net/column/kernel": (None, "model"),
    "net/column/bias": ("model",),
    "net/row/kernel": ("model", None),
}


def test_a_pair_of_columns_and_rows_sums_twice_under_both_strategies():
    """The outputs of the rows in the forward pass, the gradient of the input in the backward."""

    def program(rank, strategy):
        distribute((1, 2), MEGATRON, strategy)
        keras.utils.set_random_seed(3)
        layers = [
            keras.layers.Dense(5, activation="tanh"),
            keras.layers.Dense(8, activation="tanh", name="column"),
            keras.layers.Dense(3, name="row"),
        ]
        model = keras.Sequential([keras.Input((6,)), *layers], name="net")
        with count_collectives() as forward:
            loss = torch.mean((model(torch.tensor(ROWS)) - torch.tensor(TARGETS)) ** 2)
        with count_collectives() as backward:
            loss.backward()
        kinds = {type(v._value) for v in model.variables}
        counted = [(dict(each.calls), dict(each.operand_bytes)) for each in (forward, backward)]
        return counted, kinds

    outputs, inputs = 4 * 12 * 3, 4 * 12 * 5
    expected = [({"all_reduce": 1}, {"all_reduce": size}) for size in (outputs, inputs)]
    for strategy, kind in {"manual": LocalShardTensor, "dtensor": ShardedDTensor}.items():
        assert run_ranks(program, 2, strategy) == [(expected, {kind})] * 2


def full_kernels_alive(rank, held):
    distribute((2, 1), {".*kernel": (None, "data")}, **GATHER)
    model = perceptron()
    hold(model, held)
    x = shardcore.distribute_tensor(torch.tensor(ROWS[:10]), ("data", None))
    loss = model(x).sum()
    gc.collect()
    whole = [(6, 8), (8, 3)]
    plain = [t for t in gc.get_objects() if type(t) is torch.Tensor]
    found = sorted(tuple(t.shape) for t in plain if tuple(t.shape) in whole)
    loss.backward()
    return found


def test_a_gathered_kernel_above_the_limit_is_freed_after_its_use():
    assert run_ranks(full_kernels_alive, 2, KERNEL - 1) == [[], []]
    # The oldest goes: both do not fit.
    assert run_ranks(full_kernels_alive, 2, 4 * 6 * 8) == [[(8, 3)]] * 2
    assert run_ranks(full_kernels_alive, 2, 4 * 6 * 8 + KERNEL) == [[(6, 8), (8, 3)]] * 2


def rows_and_columns(x):
    row, rest = x[0], x[1:].view(-1)
    x.add_(1)
    row.mul_(10)
    rest[4] = 100.0
    return x, row, rest


def lists_of_views(x):
    row, column = x[0], x[:, 1]
    torch._foreach_add_([row[1:], x, column], [1.0, 2.0, 3.0])
    torch._foreach_mul_([row, column], [column[:3], torch.tensor(2.0)])
    return x, row, column


def out_into_a_view(x):
    torch.add(x[0], 1.0, out=x[0])
    return (x,)


def detached_from_a_pending_sum(x):
    total = x.sum(0)
    alias, some = total.detach(), total[1:]
    total.mul_(2)
    some.detach().add_(1)
    return total, alias, some


def while_inferring(x):
    with torch.inference_mode():
        doubled = x * 2
        row = doubled[1]
        doubled[0] = 7.0
        row.view(1, 3)[0].mul_(2)
    return doubled, row


WRITES = [
    rows_and_columns,
    lists_of_views,
    out_into_a_view,
    detached_from_a_pending_sum,
    while_inferring,
]


def test_views_of_a_sharded_dim_are_written_and_read_as_on_one_device():
    values = np.arange(12.0, dtype="float32").reshape(4, 3)

    def program(rank):
        distribute((2, 1), {})
        x = torch.tensor(values)
        return {
            write.__name__: [
                each.numpy() for each in write(shardcore.distribute_tensor(x, ("data", None)))
            ]
            for write in WRITES
        }

    for found in run_ranks(program, 2):
        for write in WRITES:
            expected = [each.numpy() for each in write(torch.tensor(values))]
            for one, other in zip(found[write.__name__], expected, strict=True):
                np.testing.assert_array_equal(one, other, err_msg=write.__name__)


def test_the_gradient_of_a_parameter_that_keras_does_not_know_is_clipped_in_place():
    """It arrives as a view of a partial sum."""

    def gradient(x, scale):
        (x * scale + 1).sum().backward()
        torch.nn.utils.clip_grad_norm_([scale], 0.5, foreach=False)
        return scale.grad

    def program(rank):
        distribute((2, 1), {})
        x = shardcore.distribute_tensor(torch.tensor(ROWS), ("data", None))
        return gradient(x, torch.nn.Parameter(torch.ones(6))).numpy()

    expected = gradient(torch.tensor(ROWS), torch.nn.Parameter(torch.ones(6))).numpy()
    for found in run_ranks(program, 2):
        np.testing.assert_allclose(found, expected, atol=1e-6)


def test_a_composite_operator_is_sharded_in_inference_mode():
    """It arrives there as it is, and not as what it is made of."""

    def inferred(x):
        with torch.inference_mode():
            hidden = torch.nn.functional.linear(x, torch.ones(4, 6), torch.arange(4.0))
            return torch.nn.functional.layer_norm(hidden, (4,)).to(torch.float64)

    def program(rank):
        distribute((2, 1), {})
        forget_fallbacks()
        found = inferred(shardcore.distribute_tensor(torch.tensor(ROWS), ("data", None)))
        return found.numpy(), dict(fallbacks())

    expected = inferred(torch.tensor(ROWS)).numpy()
    for found, fell_back in run_ranks(program, 2):
        assert fell_back == {}
        np.testing.assert_allclose(found, expected, atol=1e-5)


def test_out_of_another_shape_is_refused():
    def program(rank):
        distribute((2, 1), {})
        x = shardcore.distribute_tensor(torch.tensor(ROWS), ("data", None))
        with pytest.raises(StrategyError, match=r"\(6,\) into a sharded tensor of shape \(0, 6\)"):
            torch.add(x[0], 1.0, out=torch.zeros_like(x[:0]))
        y = torch.zeros_like(x)
        return torch.add(x, 1.0, out=y) is y, y.numpy() - ROWS

    for same, difference in run_ranks(program, 2):
        assert same
        np.testing.assert_allclose(difference, 1.0, atol=1e-6)


# No code may import DTensor, not even torch and Keras; these are imported once, for both ranks.
BLOCKED = """
import os, sys

class Blocked:
    def find_spec(self, name, path=None, target=None):
        if (name + ".").startswith("torch.distributed.tensor."):
            raise ModuleNotFoundError(f"{name} is blocked")

sys.meta_path.insert(0, Blocked())
os.environ["KERAS_BACKEND"] = "torch"
import keras, numpy as np, shardcore, shardcore.testing

def trained(rank):
    status = shardcore.install("auto")
    keras.distribution.set_distribution(keras.distribution.DataParallel())
    keras.utils.set_random_seed(1)
    layers = [keras.layers.Dense(3), keras.layers.BatchNormalization(), keras.layers.Dense(1)]
    model = keras.Sequential([keras.Input((4,)), *layers])
    model.compile("adam", "mse")
    history = model.fit(np.ones((10, 4)), np.ones((10, 1)), batch_size=4, epochs=3, verbose=0)
    model.save_weights("trained.weights.h5")
    assert shardcore.verify(model).ok and "loss" in history.history
    return f"trained by {status.strategy}: {status.passed_over['dtensor']}"

print(*shardcore.testing.run_ranks(trained, 2), sep="\\n")
"""


def test_without_dtensor_auto_takes_it_and_says_why(tmp_path):
    ran = warm.new_interpreter(["-c", BLOCKED], cwd=tmp_path)
    printed, said = ran.communicate(timeout=180)
    assert ran.returncode == 0, said
    reason = "DTensor is not available: torch.distributed.tensor is blocked. Install a torch"
    assert printed == f"trained by manual: {reason} that has it.\n" * 2
    assert f"strategy 'manual' chosen (not 'dtensor': {reason}" in said
