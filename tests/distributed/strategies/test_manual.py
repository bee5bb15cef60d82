"""Strategy `manual`: what a rank stores, what it gathers and when, and what it reduces together.

The tests of gathering ask for `weights="gather"`: it is no default.
"""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

import shardcore
from shardcore.adapters.engine.local_shards import LocalShardTensor
from shardcore.domain.errors import CallProblem, MeshError, RankMismatchError, StrategyError
from shardcore.testing import run_ranks
from tests import warm
from tests.distributed.strategies.manual import (
    KERNEL,
    ROWS,
    TARGETS,
    calls_of_a_step,
    distribute,
    engine_of,
    perceptron,
)


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
        with ThreadPoolExecutor(1) as pool, pytest.raises(CallProblem, match="collective"):
            pool.submit(loss.backward).result(timeout=20)

    run_ranks(program, 2)


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
        with pytest.raises(
            RankMismatchError, match=r"and rank 1 with .*latency=1.0.* on every rank"
        ):
            distribute((1, 2), {}, strategy, **options)

    run_ranks(program, 2)


def test_a_link_of_an_axis_that_is_not_there_is_refused():
    def program(rank):
        with pytest.raises(MeshError, match=r"\['modle'\], but the mesh has"):
            distribute((1, 2), {}, links={"modle": shardcore.Link()})

    run_ranks(program, 2)


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
