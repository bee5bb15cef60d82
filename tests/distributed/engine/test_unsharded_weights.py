"""Weights that are all-gathered for a use: held for the next use, never after a write."""

import keras
import pytest
import torch

import shardcore
from shardcore.adapters.engine.engine import UnshardedWeights
from shardcore.adapters.engine.redistribution import Redistribution
from shardcore.domain.engine.held_weights import WeightSize
from shardcore.domain.layouts.layout import Layout
from shardcore.testing import count_collectives, run_ranks
from tests.distributed.programs import distribute

X = torch.arange(8.0).reshape(4, 2)


def weight(spec=("data", None)):
    distribution = distribute((2, 1), {"w": spec})
    assert distribution is keras.distribution.distribution()
    return keras.Variable(torch.ones(2, 6), name="w")


def rows():
    """The batch `X`, sharded by rows."""
    return shardcore.distribute_tensor(X, ("data", None))


def moved(call):
    with count_collectives() as traffic:
        result = call()
    return dict(traffic.calls), result.full_tensor()


def used_and_written(rank):
    w = weight()
    x = rows()
    uses = [moved(lambda: x @ w.value)]
    uses.append(moved(lambda: x @ w.value))
    with torch.no_grad():
        w.value.mul_(2.0)
    uses.append(moved(lambda: x @ w.value))
    w.assign(torch.full((2, 6), 3.0))
    uses.append(moved(lambda: x @ w.value))
    with torch.no_grad():
        w.value.to_local().fill_(4.0)
    uses.append(moved(lambda: x @ w.value))
    return [(calls, value.detach().numpy()) for calls, value in uses]


def test_a_weight_is_gathered_again_after_each_write():
    once, never = {"all_gather": 1}, {}
    expected = [(once, 1.0), (never, 1.0), (once, 2.0), (once, 3.0), (once, 4.0)]
    for uses in run_ranks(used_and_written, 2):
        for (calls, found), (count, factor) in zip(uses, expected, strict=True):
            assert calls == count
            assert found == pytest.approx((X @ torch.ones(2, 6)).numpy() * factor)


SMALL, LARGE = 6 * 8 * 4, 6 * 16 * 4  # bytes


def uses_of(columns):
    """Returns a function that all-gathers weights of some columns, and returns their number."""
    weights = {
        name: keras.Variable(torch.ones(6, count), name="w") for name, count in columns.items()
    }

    def gathers(unsharded, *names):
        with count_collectives() as traffic:
            for name in names:
                value = weights[name]._value.detach()
                full = Layout.replicated(value.engine.world.mesh, 2)
                move = Redistribution.to(value.form, full, value.engine)
                unsharded.get(value.memory, value.part, move, value.engine)
        return traffic.calls["all_gather"]

    return gathers


def held(rank):
    distribution = distribute((2, 1), {"w": ("data", None)})
    assert distribution is keras.distribution.distribution()
    gathers = uses_of({"a": 8, "b": 8, "large": 16, "other": 16})
    one, sizes = (
        (WeightSize(LARGE, LARGE),),
        (WeightSize(SMALL, 2 * SMALL), WeightSize(LARGE, LARGE)),
    )
    found = [
        gathers(UnshardedWeights(one), "large", "large", "other", "large"),
        # The large ones push the small one out if their size is the same.
        gathers(UnshardedWeights(one), "a", "large", "a"),
        gathers(UnshardedWeights(sizes), "a", "b", "large", "other", "a", "b"),
        gathers(UnshardedWeights(sizes), "large", "a", "b", "large", "other", "large"),
        gathers(UnshardedWeights((WeightSize(SMALL, SMALL),)), "large", "large"),
    ]
    unsharded = UnshardedWeights(sizes)
    gathers(unsharded, "a", "b", "large", "other", "large")
    return found, unsharded.bytes


def test_the_engine_holds_the_latest_gathered_weights_of_each_size():
    assert run_ranks(held, 2) == [([3, 3, 4, 5, 2], 2 * SMALL + LARGE)] * 2


def after_a_step(rank):
    distribute((2, 1), {".*kernel": ("data", None)})
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(6)])
    model.predict(X.numpy(), batch_size=4, verbose=0)
    return model.layers[0].kernel._value.engine.unsharded.bytes


def test_no_gathered_weight_is_kept_after_a_step():
    assert run_ranks(after_a_step, 2) == [0, 0]


def in_half_precision(rank):
    distribute((2, 1), {"w": (None, "data")})
    w = keras.Variable(torch.ones(2, 64), name="w")  # larger than the activation
    x = rows().to(torch.bfloat16)
    with count_collectives() as traffic:
        (x @ w.value.to(torch.bfloat16)).sum().backward()
    return dict(traffic.operand_bytes), w.value.grad.full_tensor().numpy()


def test_a_cast_weight_is_gathered_in_the_smaller_dtype():
    for moved_bytes, gradient in run_ranks(in_half_precision, 2):
        assert moved_bytes == {"all_gather": 2 * 32 * 2, "reduce_scatter": 2 * 64 * 4}
        assert gradient == pytest.approx(X.sum(0)[:, None].expand(2, 64).numpy())
