"""A step that cannot be captured runs eagerly, on all ranks, and says once why."""

import multiprocessing
import os
import random
import sys
import time

import attrs
import keras
import numpy as np
import pytest
import torch

from shardcore.adapters.capture.running import program as capture_program
from shardcore.adapters.capture.running.program import started_collectives
from shardcore.testing import RankFailed, run_ranks
from tests.distributed.capture.steps import (
    Spy,
    assert_equal,
    batches,
    begin,
    compiled,
    is_real,
    messages,
    mlp,
    plain_mlp,
    reasons,
    trained,
)
from tests.distributed.programs import DEVICE

RNG = np.random.default_rng(3)


def unguarded(name):
    """A global variable whose name no function has, so that no guard sees it."""
    return getattr(sys.modules[__name__], name.upper())


class ReadsValues(Spy):
    def call(self, x):
        if is_real(x) and x.detach().cpu().numpy().sum() > 1e9:
            return -x
        return super().call(x)


class Counts(Spy):
    count = 0

    def call(self, x):
        self.count += is_real(x)
        return super().call(x)


class DrawsFromGlobal(Spy):
    def call(self, x):
        return super().call(x) * float(RNG.random())


class Draws(Spy):
    def call(self, x):
        return super().call(x) * float(unguarded("rng").random())


class TakesABranch(Spy):
    def call(self, x):
        x = super().call(x)
        return x * 2 if is_real(x) and random.random() < 0.01 else x


class SetsTheGenerator(Spy):
    def call(self, x):
        if is_real(x):
            torch.manual_seed(0)
        return super().call(x) + torch.rand_like(x)


class Keeps(Spy):
    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.cache = {"last": 0}

    def call(self, x):
        self.cache["last"] = x
        return super().call(x)


class IsSparse(Spy):
    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.adjacent = torch.eye(4, device=DEVICE).to_sparse()

    def call(self, x):
        return torch.sparse.mm(self.adjacent, super().call(x)) if is_real(x) else x


class IsHooked(Spy):
    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.register_forward_hook(lambda *given: None)


class IsHookedBackward(Spy):
    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.inner = torch.nn.Identity()
        self.inner.register_full_backward_pre_hook(lambda *given: None)

    def call(self, x):
        return self.inner(super().call(x)) if is_real(x) else super().call(x)


class CountsByKeras(Spy):
    def call(self, x):
        found = super().call(x)
        if not is_real(x):
            return found
        counts = keras.ops.bincount(keras.ops.cast(x[:, 0] > 0, "int32"))
        return found * keras.ops.cast(keras.ops.sum(counts), found.dtype)


class ReadsAVariable(Spy):
    def build(self, shape):
        super().build(shape)
        self.scale = self.add_weight(shape=(2,), trainable=False, name="scale")

    def call(self, x):
        return super().call(x) * float(self.scale.numpy().sum()) if is_real(x) else super().call(x)


class TakesTime(Spy):
    def call(self, x):
        time.perf_counter()
        return super().call(x)


class TakesALock(Spy):
    lock = multiprocessing.Lock()

    def call(self, x):
        with self.lock:
            return super().call(x)


NOT_HELD = torch.ones(4)


class ReadsUnguarded(Spy):
    def call(self, x):
        return super().call(x) * (unguarded("not_held").to(x.device) if is_real(x) else 1.0)


@pytest.mark.parametrize(
    ("layer", "said"),
    [
        (ReadsValues, "reads values on the host"),
        (CountsByKeras, "Keras computes it so, and a step with it cannot be captured"),
        (ReadsAVariable, "test_not_captured.py"),
        (TakesTime, "time steps in a callback"),
        (TakesALock, "take the lock outside of the step"),
        (Counts, "attribute 'count' of Counts"),
        (Draws, "it reads sys.modules"),
        (DrawsFromGlobal, "global variable 'RNG'"),
        (TakesABranch, "Python or NumPy draws random numbers"),
        (SetsTheGenerator, "the state of torch's random generator is set"),
        (Keeps, "attribute 'cache' of Keeps"),
        (IsSparse, "a sparse tensor"),
        (IsHooked, "has a hook"),
        (IsHookedBackward, "has a hook"),
        (ReadsUnguarded, "it reads sys.modules"),
    ],
)
def test_a_step_that_cannot_be_captured_runs_eagerly_and_says_once_why(layer, said):
    ((messages, runs),) = run_ranks(lambda rank: reasons(layer, steps=6), 1)
    assert runs == 6
    (message,) = messages
    assert "train_step of model" in message
    assert said in message
    if layer is ReadsValues:
        assert "test_not_captured.py" in message


def double(parameter):
    parameter.grad = parameter.grad * 2


def double_in_place(parameter):
    parameter.grad.mul_(2)


@pytest.mark.parametrize("change", [double, double_in_place])
def test_a_step_whose_gradient_a_hook_changes_before_its_sum_runs_eagerly(change):
    def program(rank):
        begin((2, 1))
        said, data = messages(), batches(plain_mlp, 3)
        found = []
        for jit in (False, "auto"):
            model = compiled(plain_mlp, jit, "sgd")  # Adam's update does not depend on the scale
            kernel = model.get_layer("first").kernel.value
            kernel.register_post_accumulate_grad_hook(change)
            found.append(trained(model, data))
        return found, said

    for ((eager, _), (captured, runs)), said in run_ranks(program, 2):
        assert_equal(captured, eager)
        assert runs == 3
        assert "a hook of a parameter changes its gradient" in said[0]


def test_autocast_that_keeps_casts_of_weights_is_a_reason_to_run_eagerly():
    def program(rank):
        begin(None)
        said, model = messages(), compiled(mlp, "auto")
        with torch.autocast(DEVICE, torch.bfloat16):
            for x, _ in batches(mlp):
                model.predict_on_batch(x)
        return said

    ((message,),) = run_ranks(program, 1)
    assert "cache_enabled=False" in message


def test_ranks_capture_a_step_together_or_not_at_all():
    class CountsOnOneRank(Spy):
        def call(self, x):
            if is_real(x) and torch.distributed.get_rank() == 1:
                self.count = getattr(self, "count", 0) + 1
            return super().call(x)

    first, second = run_ranks(lambda rank: reasons(CountsOnOneRank, shape=(2, 1)), 2)
    assert first[1] == second[1] == 4
    assert "'count'" in first[0][0]
    assert first[0] == second[0]


def test_ranks_whose_collectives_have_other_sizes_capture_nothing():
    def longer(trace, **how):
        return [
            attrs.evolve(each, elements=each.elements + 1)
            for each in started_collectives(trace, **how)
        ]

    def program(rank):
        if rank == 1:
            capture_program.started_collectives = longer
        return reasons(Spy, shape=(2, 1))

    for said, runs in run_ranks(program, 2):
        assert runs == 4
        assert "the ranks start other collectives" in said[0]


def test_ranks_of_which_one_would_replay_a_cuda_graph_capture_nothing():
    def program(rank):
        def replayed(trace, in_graph):
            return started_collectives(trace, in_graph=rank == 1)

        capture_program.started_collectives = replayed
        return reasons(Spy, shape=(2, 1))

    for said, runs in run_ranks(program, 2):
        assert runs == 4
        assert "the ranks start other collectives" in said[0]


def test_a_rank_that_alone_sees_a_change_says_so_on_all():
    def program(rank):
        os.environ["SHARDCORE_TIMEOUT"] = "1"
        begin((2, 1))
        model, data = compiled(plain_mlp, "auto"), batches(plain_mlp, 4)
        for x, y in data:
            model.train_on_batch(x, y)
        if rank == 1:
            model.get_layer("first").activation = keras.activations.tanh
        model.train_on_batch(*data[0])

    said = "(?s)rank 1 .*Rank 1 records train_step of .* again, because attribute 'activation' of"
    with pytest.raises(RankFailed, match=said):
        run_ranks(program, 2, timeout=20)
