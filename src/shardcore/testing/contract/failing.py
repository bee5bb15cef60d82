"""The promise of a failing rank: programs in new processes, as users start them."""

import os
import subprocess
import sys
from typing import Any

from shardcore.adapters.ranks.job.forked_ranks import free_port
from shardcore.domain.errors import ShardcoreError
from shardcore.testing.contract.meshes import OnMeshes
from shardcore.testing.contract.training import distribute
from shardcore.testing.ranks import run_ranks

PROGRAM = """
import sys
import shardcore
shardcore.install(sys.argv[1])
import keras
import numpy as np
keras.distribution.set_distribution(keras.distribution.DataParallel())

class Fails(keras.Sequential):
    def train_step(self, data):
        if self.optimizer.iterations == 2 and shardcore.status().rank == 1:
            raise ValueError("the first error")
        return super().train_step(data)

model = Fails([keras.Input((3,)), keras.layers.Dense(2)])
model.compile("sgd", "mse")
model.fit(np.ones((64, 3)), np.ones((64, 2)), batch_size=4, verbose=0)
"""
SECONDS = 90


class FailurePromises(OnMeshes):
    """A rank that fails ends all of them."""

    def test_a_failing_rank_ends_all_with_its_error_first(self) -> None:
        """Fails a rank during training; a strategy that does not serve two ranks fails on both."""
        if not self.serves((2, 1)):
            assert run_ranks(_is_refused, 2, self.strategy) == [True, True]
            return
        codes, errors = _run_two_ranks(self.strategy)
        assert 0 not in codes, f"both ranks must fail, got the exit codes {codes}: {errors}"
        own = errors[1].partition("[rank 1] failed:")[2]
        assert "ValueError: the first error" in own, f"rank 1 must print its error, got {errors[1]}"
        copy = errors[0].partition("[rank 0] ends, as rank 1 failed first:")[2]
        assert "ValueError: the first error" in copy, f"rank 0 must print it too, got {errors[0]}"


def _is_refused(rank: int, strategy: str) -> bool:
    try:
        distribute(strategy, (2, 1))
    except ShardcoreError as error:
        return repr(strategy) in str(error)
    return False


def _run_two_ranks(strategy: str) -> tuple[list[Any], list[str]]:
    address = f"127.0.0.1:{free_port()}"
    words = ["-c", PROGRAM, strategy]
    ranks = [_start(words, _environment(rank, address)) for rank in range(2)]
    try:
        errors = [rank.communicate(timeout=SECONDS)[1] for rank in ranks]
    except subprocess.TimeoutExpired as error:
        raise AssertionError(f"a rank has not ended within {SECONDS} seconds") from error
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    return [rank.returncode for rank in ranks], errors


def _environment(rank: int, address: str) -> dict[str, str]:
    variables = {
        "KERAS_DISTRIBUTION_JOB_ADDRESSES": address,
        "KERAS_DISTRIBUTION_NUM_PROCESSES": "2",
        "KERAS_DISTRIBUTION_PROCESS_ID": str(rank),
        "OMP_NUM_THREADS": "1",
        # A plug-in that this process finds is found there too.
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
    }
    return {**os.environ, **variables}


def _start(words: list[str], environment: dict[str, str]) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [sys.executable, *words],
        env=environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
