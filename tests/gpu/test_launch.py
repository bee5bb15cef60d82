"""Ranks that a notebook launches after it has used the GPU, and plans that it makes then.

The process of a test is the notebook.
"""

import logging
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import torch

import shardcore
from shardcore.adapters.ranks.launch import new_ranks
from shardcore.domain.errors import EnvironmentProblem, RankFailed
from shardcore.domain.layouts.mesh import Mesh
from shardcore.testing import run_ranks

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="it is about a GPU")

X = np.linspace(-1, 1, 64 * 8, dtype="float32").reshape(64, 8)
# The seconds after which a cell is interrupted: a rank has trained by then.
INTERRUPTED_AFTER = 15.0


def build() -> Any:
    layers = [keras.layers.Dense(32, activation="relu"), keras.layers.Dense(4)]
    model = keras.Sequential([keras.Input((8,)), *layers])
    model.compile("adam", "mse")
    return model


def fit(epochs: int) -> tuple[Any, list[float]]:
    keras.utils.set_random_seed(1)
    model = build()
    return model, model.fit(X, X[:, :4], batch_size=16, epochs=epochs, verbose=0).history["loss"]


def train(epochs: int, path: str = "") -> tuple[list[float], str, str, float]:
    keras.distribution.set_distribution(keras.distribution.DataParallel())
    model, losses = fit(epochs)
    if path:
        model.save(path)
    device = model.variables[0].value.device
    looks = os.environ.get("PYTORCH_NVML_BASED_CUDA_CHECK", "unset")
    return losses, str(device), looks, evaluated(model)


def evaluated(model: Any) -> float:
    return float(model.evaluate(X, X[:, :4], batch_size=16, verbose=0))


@pytest.fixture
def losses() -> Iterator[list[float]]:
    """The losses of a notebook that has trained on the GPU."""
    shardcore.install()
    found = fit(4)[1]
    assert torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    yield found
    shardcore.uninstall()


def test_ranks_train_on_the_gpu_again_and_again(losses: list[float], tmp_path: Path) -> None:
    path = str(tmp_path / "model.keras")
    results = [shardcore.launch(train, 1, 4, path)[0] for _ in range(3)]
    for found, device, looks, _ in results:
        assert (device, looks) == ("cuda:0", "unset")
        np.testing.assert_allclose(found, losses, rtol=1e-4)
    after = results[-1][-1]
    np.testing.assert_allclose(evaluated(keras.models.load_model(path)), after, rtol=1e-4)


def test_a_rank_trains_after_an_error_and_an_interrupt(losses: list[float]) -> None:
    held = torch.ones(2, device="cuda")

    def fails() -> None:
        train(1)
        raise ValueError("too few rows")

    def never_ends() -> None:
        train(1)
        time.sleep(600)

    with pytest.raises(RankFailed, match="ValueError: too few rows"):
        shardcore.launch(fails, 1)
    interrupt = threading.Timer(INTERRUPTED_AFTER, os.kill, (os.getpid(), signal.SIGINT))
    interrupt.start()
    with pytest.raises(KeyboardInterrupt):
        shardcore.launch(never_ends, 1)
    with pytest.raises(EnvironmentProblem, match=r"variable 'held', which <lambda>\(\) reads"):
        shardcore.launch(lambda: held, 1)
    np.testing.assert_allclose(shardcore.launch(train, 1, 4)[0][0], losses, rtol=1e-4)


def test_ranks_share_the_gpu(losses: list[float], caplog: pytest.LogCaptureFixture) -> None:
    """And the notebook says what it holds of its memory."""
    held = torch.ones(50_000_000, device="cuda")
    with caplog.at_level(logging.WARNING, "shardcore.launch"):
        results = shardcore.launch(train, 2, 4)
    for found, *_ in results:
        np.testing.assert_allclose(found, losses, rtol=1e-4)
    assert "GB of device cuda:0" in caplog.text
    assert "float32 (50000000,)" in caplog.text
    assert held.nbytes == 200_000_000


def test_plans_and_estimates_are_made_after_the_gpu_was_used(losses: list[float]) -> None:
    assert not new_ranks.fork_can_compute()
    with pytest.raises(EnvironmentProblem, match="Leave start= out"):
        shardcore.launch(train, 1, 1, start="fork")
    batch = keras.ops.convert_to_tensor(X), keras.ops.convert_to_tensor(X[:, :4])
    assert batch[0].device.type == "cuda"
    plan = shardcore.plan(build, Mesh((4,), ("data",)), policy="fully_sharded", small=0)
    memory = shardcore.estimate_memory(plan, build, batch)
    assert memory.step["batch"] == (64 * 8 + 64 * 4) * 4 // 4
    chosen = shardcore.plan(build, policy="auto", devices=2, batch=batch)
    assert chosen.ranking is not None
    assert len(chosen) > 0
    assert len(losses) == 4


def test_ranks_of_tests_run_after_the_gpu_was_used(losses: list[float]) -> None:
    def total(rank: int) -> float:
        tensor = torch.full((2,), rank + 1.0, device="cuda")
        torch.distributed.all_reduce(tensor)
        return float(tensor.sum())

    assert run_ranks(total, 2) == [6.0, 6.0]
    assert len(losses) == 4
