"""SIGTERM to one rank ends all: they save at one point of `fit`, `finally` blocks run, code 143.

Whole programs in separate processes, as the exit codes and the printed lines are the subject.
"""

import json
import time

import pytest

from tests import warm
from tests.distributed.failure.failing_program import environment

PROGRAM = """
import json, os, signal, sys, threading, time
import keras
import torch.distributed as dist
import shardcore
shardcore.install()
from keras import distribution, layers
kind, place, folder = sys.argv[1:4]
rank = int(os.environ["RANK"])
mesh = distribution.DeviceMesh((1, 2), ("data", "model"))
rules = distribution.LayoutMap(mesh)
rules[".*hidden/kernel"] = (None, "model")
distribution.set_distribution(distribution.ModelParallel(layout_map=rules, batch_dim_name="data"))
keras.utils.set_random_seed(1)
model = keras.Sequential([keras.Input((8,)), layers.Dense(16, name="hidden"), layers.Dense(1)])
model.compile("adam", "mse")
x = keras.random.uniform((64, 8), seed=1)
done = []


class Progress(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        time.sleep(0.02)
        done.append(batch)
        if len(done) == 5:
            open(f"{folder}/trains-{rank}", "w").close()
        if place == "slow batch" and len(done) == 6:
            time.sleep(60)


savers = {
    "nothing": [],
    "ShardedCheckpoint": [shardcore.ShardedCheckpoint(f"{folder}/checkpoints", every_epochs=1000)],
    "BackupAndRestore": [keras.callbacks.BackupAndRestore(f"{folder}/backup")],
}


def train():
    model.fit(x, x[:, :1], batch_size=8, epochs=10**6, verbose=0,
              callbacks=[Progress(), *savers[kind]])


def compute():
    open(f"{folder}/trains-{rank}", "w").close()
    while True:
        time.sleep(0.01)


def save():
    open(f"{folder}/trains-{rank}", "w").close()
    while True:
        model.save(f"{folder}/a.keras")


def wait():
    open(f"{folder}/trains-{rank}", "w").close()
    dist.barrier()


def main(work):
    try:
        work()
    finally:
        open(f"{folder}/steps-{rank}", "w").write(json.dumps([len(done), time.time()]))


def in_handler(work):
    try:
        open("/there/is/none")
    except FileNotFoundError:
        main(work)


if place == "handler":
    in_handler(train)
elif place == "handler outside of fit":
    in_handler(compute)
elif place == "collective":
    main(lambda: (compute if rank == 0 else wait)())
elif place == "save":
    main(save)
elif place == "outside of fit":
    main(compute)
elif place == "other rank in handler":
    in_handler(compute) if rank == 0 else main(compute)
else:
    main(train)
"""


class Ended:
    """The outcome of two ranks after SIGTERM to one of them."""

    def __init__(self, folder, kind, place, terminated):
        words = ["-c", PROGRAM, kind, place, str(folder)]
        ranks = warm.start_ranks(words, 2, environment())
        try:
            wait_for(lambda: all((folder / f"trains-{rank}").exists() for rank in range(2)))
            sent = time.time()
            ranks[terminated].terminate()
            outputs = [rank.communicate(60) for rank in ranks]
            self.seconds = time.time() - sent
        finally:
            for rank in ranks:
                rank.kill()
        self.codes = [rank.returncode for rank in ranks]
        self.errors = [error for _, error in outputs]
        cleaned = [folder / f"steps-{rank}" for rank in range(2)]
        found = [json.loads(path.read_text()) for path in cleaned if path.exists()]
        self.steps = [steps for steps, _ in found]

    def assert_named(self, rank):
        assert self.codes == [143, 143], self.errors
        assert len(self.steps) == 2, "the finally blocks ran"
        for error in self.errors:
            assert error.splitlines()[-1].endswith(f"ends: SIGTERM on rank {rank}"), error


def wait_for(is_so, seconds=60):
    deadline = time.monotonic() + seconds
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.parametrize(("kind", "rank"), [("ShardedCheckpoint", 1), ("BackupAndRestore", 0)])
def test_all_ranks_save_at_one_step_and_end(tmp_path, kind, rank):
    ended = Ended(tmp_path, kind, "fit", rank)
    ended.assert_named(rank)
    assert ended.steps[0] == ended.steps[1]
    if kind == "ShardedCheckpoint":
        names = [path.name for path in (tmp_path / "checkpoints").iterdir()]
        assert f"step-{ended.steps[0]:08}" in names
    else:
        assert (tmp_path / "backup" / "latest.weights.h5").exists()


@pytest.mark.parametrize(
    ("kind", "place", "rank"),
    [
        ("nothing", "fit", 0),
        ("ShardedCheckpoint", "handler", 0),
        ("nothing", "handler", 1),
        ("nothing", "handler outside of fit", 1),
        ("nothing", "outside of fit", 0),
        ("nothing", "save", 1),
        ("nothing", "slow batch", 1),
        ("nothing", "other rank in handler", 1),
    ],
)
def test_all_ranks_end_in_ten_seconds_wherever_they_are(tmp_path, kind, place, rank):
    ended = Ended(tmp_path, kind, place, rank)
    ended.assert_named(rank)
    assert ended.seconds < 10


def test_a_rank_that_waits_in_a_collective_ends_too(tmp_path):
    """No Python runs on its main thread until the connection breaks."""
    ended = Ended(tmp_path, "nothing", "collective", 1)
    ended.assert_named(1)
    assert ended.seconds < 10
