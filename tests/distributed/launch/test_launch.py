"""Ranks that a notebook's cell or a plain program launches."""

import multiprocessing
import os
import signal
import subprocess
import sys
import time

import keras
import numpy as np
import pytest

import shardcore
from shardcore.domain.errors import ArgumentProblem, EnvironmentProblem, MeshError
from shardcore.testing import RankFailed, run_ranks

X = np.linspace(-1, 1, 48, dtype="float32").reshape(8, 6)


def train(epochs=2):
    """As a cell would have it: it installs shardcore, trains, and returns numbers."""
    shardcore.install()
    keras.utils.set_random_seed(1)
    keras.distribution.set_distribution(keras.distribution.DataParallel())
    model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(2, name="d")])
    model.compile("adam", "mse")
    losses = model.fit(X, X[:, :2], batch_size=4, epochs=epochs, verbose=0).history["loss"]
    return shardcore.status().world_size, losses


def test_cells_that_are_run_again_give_the_numbers_of_one_device(capfd):
    ((size, expected),) = run_ranks(lambda rank: train(), 1, init=False)
    assert size == 1
    for _ in range(2):
        for size, losses in shardcore.launch(train, 2):
            assert size == 2
            np.testing.assert_allclose(losses, expected, rtol=1e-5)
    assert len(shardcore.launch(train, 2, 1)[1][1]) == 1
    assert multiprocessing.active_children() == []
    assert capfd.readouterr() == ("", "")


def test_the_error_of_a_rank_comes_once_and_a_further_cell_runs(capfd):
    def fails():
        train()
        if shardcore.status().rank == 1:
            raise ValueError("too few rows")
        return train()  # which waits for rank 1

    with pytest.raises(RankFailed) as failed:
        shardcore.launch(fails, 2)
    assert failed.value.rank == 1
    assert str(failed.value).count("ValueError: too few rows") == 1
    assert str(failed.value).count("Traceback") == 1
    shown = "\n".join(failed.value._render_traceback_())  # by IPython
    assert shown.startswith("RankFailed: rank 1 failed:\nTraceback")
    assert "src/shardcore" not in shown
    assert multiprocessing.active_children() == []
    assert capfd.readouterr() == ("", "")
    assert [size for size, _ in shardcore.launch(train, 2)] == [2, 2]


def test_what_cannot_be_launched_is_refused():
    with pytest.raises(MeshError, match="at least 1 rank, got 0"):
        shardcore.launch(train, 0)

    def inside(rank):
        with pytest.raises(EnvironmentProblem, match=rf"is rank {rank} of 2 already: call the fun"):
            shardcore.launch(train, 2)

    run_ranks(inside, 2, init=False)


@pytest.mark.parametrize("devices", [1.5, "2", None, True, [2]])
def test_a_number_of_ranks_that_is_none_is_refused(devices):
    with pytest.raises(ArgumentProblem, match="a whole number of ranks for launch") as refused:
        shardcore.launch(train, devices)
    assert (refused.value.name, refused.value.got) == ("launch(devices)", repr(devices))
    with pytest.raises(ArgumentProblem, match=r"run_ranks\(world_size\)"):
        run_ranks(train, devices)


@pytest.mark.parametrize("start", ["fork", "spawn"])
@pytest.mark.parametrize("function", [5, None, "train"])
def test_what_is_no_function_is_refused_before_a_rank_starts(function, start):
    with pytest.raises(ArgumentProblem, match="a function for launch") as refused:
        shardcore.launch(function, 2, start=start)
    assert (refused.value.name, refused.value.got) == ("launch(function)", repr(function))
    with pytest.raises(ArgumentProblem, match=r"run_ranks\(fn\)"):
        run_ranks(function, 2)


PROGRAM = """
import os, signal, time, shardcore

# A shell may have started these tests as a job that ignores interrupts.
signal.signal(signal.SIGINT, signal.default_int_handler)

def never_ends():
    os.write(1, b"%d\\n" % os.getpid())
    while True:
        time.sleep(1)

try:
    shardcore.launch(never_ends, 2)
except KeyboardInterrupt:
    os.write(1, b"interrupted\\n")
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_no_rank_outlives_an_interrupted_or_killed_program(number):
    """A terminal sends an interrupt to all of them."""
    program = subprocess.Popen(
        [sys.executable, "-c", PROGRAM],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    ranks = [int(program.stdout.readline()) for _ in range(2)]
    (os.killpg if number == signal.SIGINT else os.kill)(program.pid, number)
    out, err = program.communicate(timeout=30)
    assert (out, err) == ("interrupted\n" if number == signal.SIGINT else "", "")
    deadline = time.monotonic() + 10
    while any(map(_is_alive, ranks)):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def _is_alive(pid):
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False
