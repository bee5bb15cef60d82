"""Training in `mixed_float16`: numbers, CUDA graphs, reads of the host, and the time of a step.

On a CPU the same programs run on small models, and a stand-in replays CUDA graphs.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import keras
import numpy as np
import pytest
import torch

import shardcore
from shardcore.testing import run_ranks
from tests.distributed.precision import half_precision
from tests.distributed.precision.half_precision import INNER, STEPS, batch, compiled, state
from tests.distributed.programs import DEVICE, IS_ON_GPU

# The steps before one is replayed: two are recorded, one loads kernels, one records the graph.
REPLAYED = 5
MOST = 1.05  # the time of a step, as a part of that in bfloat16
WIDTH, ROWS, ROUNDS = (2048, 16384, 40) if IS_ON_GPU else (32, 8, 2)


@contextmanager
def without_waits() -> Iterator[None]:
    """Opens a context in which it is an error to wait for the GPU, as a read on the host does."""
    if not IS_ON_GPU:
        with half_precision.HostReads() as reads:
            yield
        assert reads.count == 0
        return
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def train(_rank: int, strategy: str | None) -> dict[str, Any]:
    """By inner optimizer, the state after each step, and the messages about captured steps."""
    if strategy:
        shardcore.install(strategy)
    found = {}
    for name, make in INNER.items():
        said = half_precision.said_of("capture")
        model = compiled(make(), "auto", width=64)
        model.make_train_function()
        states = []
        for step in range(STEPS):
            data = [batch(step)]
            if strategy and step >= REPLAYED:
                with without_waits():
                    model.train_function(data)
            else:
                model.train_function(data)
            states.append(state(model))
        found[name] = states, [each for each in said if "CUDA graph" in each]
    return found


def captured(rank: int) -> dict[str, Any]:
    with half_precision.graphs():
        return train(rank, "single")


def test_a_step_is_one_cuda_graph_that_no_host_waits_for_with_the_numbers_of_keras() -> None:
    (plain,), (found,) = run_ranks(train, 1, None), run_ranks(captured, 1)
    for name, (states, said) in found.items():
        assert len(said) == 1, name
        assert "is replayed as a CUDA graph" in said[0]
        for values, expected in zip(states, plain[name][0], strict=True):
            assert values["steps"] == expected["steps"]
            for path, value in values.items():
                np.testing.assert_allclose(value, expected[path], rtol=1e-3, atol=1e-4)


def seconds_of_steps(_rank: int) -> dict[str, float]:
    """The least seconds of a step, by policy; both train in turns."""
    shardcore.install("single")
    functions = {}
    x = torch.ones(ROWS, WIDTH, device=DEVICE)
    for policy in ("mixed_bfloat16", "mixed_float16"):
        keras.config.set_dtype_policy(policy)
        dense = [keras.layers.Dense(WIDTH, activation="relu") for _ in range(4)]
        model = keras.Sequential([keras.Input((WIDTH,)), *dense])
        model.compile("adam", "mse")
        model.make_train_function()
        functions[policy] = model.train_function
    least = dict.fromkeys(functions, float("inf"))
    for _ in range(REPLAYED + ROUNDS):
        for policy, function in functions.items():
            torch.cuda.synchronize() if IS_ON_GPU else None
            began = time.perf_counter()
            function([(x, x)])
            torch.cuda.synchronize() if IS_ON_GPU else None
            least[policy] = min(least[policy], time.perf_counter() - began)
    return least


def test_a_step_takes_the_time_of_one_in_bfloat16(record_property: Any) -> None:
    (least,) = run_ranks(seconds_of_steps, 1)
    for policy, seconds in least.items():
        record_property(policy, f"{seconds * 1e3:.3f} ms")
    if not IS_ON_GPU:
        pytest.skip("on a CPU torch computes products of float16 in another way")
    assert least["mixed_float16"] <= MOST * least["mixed_bfloat16"]
