"""Batches that are copied to a GPU while it computes the step before."""

from collections.abc import Iterable
from typing import Any

import keras
import numpy as np
import pytest
import torch
from torch.profiler import ProfilerActivity, profile

import shardcore
from shardcore.testing import run_ranks

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="it is about a GPU")

X = np.random.default_rng(0).normal(size=(96, 256)).astype("float32")
BATCH = 16
STEPS = len(X) // BATCH


def loader() -> Iterable[Any]:
    dataset = torch.utils.data.TensorDataset(torch.as_tensor(X), torch.as_tensor(X[:, :4]))
    return torch.utils.data.DataLoader(dataset, BATCH)


def fit(model: Any, source: str, epochs: int) -> list[float]:
    """Returns the losses of a fit on a source."""
    arguments: dict[str, Any] = {"x": X, "y": X[:, :4], "batch_size": BATCH}
    if source == "weights":
        arguments["sample_weight"] = X[:, 0] ** 2
    elif source == "loader":
        arguments = {"x": loader()}
    losses: list[float] = model.fit(**arguments, shuffle=False, epochs=epochs, verbose=0).history[
        "loss"
    ]
    return losses


def train(rank: int, source: str, is_distributed: bool) -> tuple[list[float], set[int], int]:
    """Returns the losses, the streams of copies from pinned memory, and their number."""
    shardcore.install("dtensor" if is_distributed else "single")
    if is_distributed:
        keras.distribution.set_distribution(keras.distribution.DataParallel())
    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.Input((256,)), keras.layers.Dense(64), keras.layers.Dense(4)])
    model.compile("adam", "mse")
    losses = fit(model, source, 4)
    profiled: Any
    with profile(activities=[ProfilerActivity.CUDA]) as profiled:
        fit(model, source, 1)
    events = profiled.profiler.kineto_results.events()
    copies = [event for event in events if event.name() == "Memcpy HtoD (Pinned -> Device)"]
    return losses, {event.device_resource_id() for event in copies}, len(copies)


def train_on_host(rank: int) -> list[float]:
    with keras.device("cpu"):
        keras.utils.set_random_seed(1)
        layers = [keras.layers.Dense(64), keras.layers.Dense(4)]
        model = keras.Sequential([keras.Input((256,)), *layers])
        model.compile("adam", "mse")
        return fit(model, "arrays", 4)


@pytest.mark.parametrize("is_distributed", [False, True])
@pytest.mark.parametrize("source", ["arrays", "weights", "loader"])
def test_batches_are_copied_from_pinned_memory_beside_the_kernels(
    source: str, is_distributed: bool
) -> None:
    ((losses, streams, copies),) = run_ranks(train, 1, source, is_distributed)
    assert copies >= 2 * (STEPS - 1)
    assert len(streams) == 1
    if source != "weights":
        (expected,) = run_ranks(train_on_host, 1)
        np.testing.assert_allclose(losses, expected, rtol=1e-4)
