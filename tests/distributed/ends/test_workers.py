"""Processes that a rank starts end by SIGTERM as they do without shardcore, also at once."""

import concurrent.futures
import multiprocessing
import signal
import subprocess
import time

import keras
import numpy as np
import pytest
import torch

from shardcore.testing import run_ranks
from tests.distributed.programs import distribute

TIMES = 25
FORK = multiprocessing.get_context("fork")


def by_multiprocessing():
    process = FORK.Process(target=time.sleep, args=(60,), daemon=True)
    process.start()
    return process


def by_futures():
    pool = concurrent.futures.ProcessPoolExecutor(1, mp_context=FORK)
    known = set(multiprocessing.active_children())
    pool.submit(time.sleep, 60)
    return next(each for each in multiprocessing.active_children() if each not in known)


class Slow(torch.utils.data.Dataset):
    def __len__(self):
        return 1

    def __getitem__(self, index):
        time.sleep(60)


def by_data_loader():
    known = set(multiprocessing.active_children())
    loader = torch.utils.data.DataLoader(Slow(), num_workers=1, multiprocessing_context=FORK)
    kept.append(iter(loader))
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # where torch raises of a worker that ends
    return next(each for each in multiprocessing.active_children() if each not in known)


def by_subprocess():
    return subprocess.Popen(["sleep", "60"])


def by_subprocess_with_a_function():
    """It forks as `os.fork` does, since Python runs in the child."""
    return subprocess.Popen(["sleep", "60"], preexec_fn=lambda: None)  # noqa: PLW1509 - the subject


kept = []  # an iterator of a loader, whose end waits for its workers
KINDS = (
    *(by_multiprocessing, by_futures, by_data_loader),
    *(by_subprocess, by_subprocess_with_a_function),
)


def is_running(process):
    return process.is_alive() if hasattr(process, "is_alive") else process.poll() is None


@pytest.mark.parametrize("start", KINDS)
def test_no_worker_outlives_sigterm(start):
    def program(rank):
        distribute((1, 2))
        started = []
        for _ in range(TIMES):
            started.append(start())
            started[-1].terminate()
        deadline = time.monotonic() + 5
        while any(map(is_running, started)) and time.monotonic() < deadline:
            time.sleep(0.05)
        lived = [each for each in started if is_running(each)]
        for each in lived:
            each.kill()
        kept.clear()
        return len(lived)

    assert run_ranks(program, 2, timeout=60) == [0, 0]


class Rows(keras.utils.PyDataset):
    def __len__(self):
        return 8

    def __getitem__(self, index):
        return np.ones((4, 2), "float32"), np.ones((4, 1), "float32")


def test_a_pool_of_keras_ends():
    def program(rank):
        distribute((2, 1))
        model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
        for _ in range(3):
            model.fit(Rows(workers=8, use_multiprocessing=True), verbose=0)

    run_ranks(program, 2, timeout=60)
