"""A rank that leaves `fit` by `sys.exit`: the others hear of it before its interpreter ends."""

import time

from tests import warm
from tests.distributed.failure.failing_program import environment

PROGRAM = """
import atexit, os, sys, time
import keras
import shardcore
from keras import distribution
# On a busy machine the end of an interpreter takes long; this one runs after those of shardcore.
atexit.register(lambda: time.sleep(float(sys.argv[3])))
shardcore.install()
exiting, rank = int(sys.argv[1]), int(os.environ["RANK"])
distribution.set_distribution(distribution.DataParallel())
model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(1)])
model.compile("sgd", "mse")
x = keras.random.uniform((64, 8), seed=1)


class Exits(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        if rank == exiting and batch == 2:
            open(sys.argv[2], "w").close()
            sys.exit(3)


model.fit(x, x[:, :1], batch_size=8, epochs=99, verbose=0, callbacks=[Exits()])
"""


def ended(folder, exiting, slow):
    """The exit codes and errors of both ranks, and the seconds until the other one has ended."""
    words = ["-c", PROGRAM, str(exiting), str(folder / "exits"), str(slow)]
    ranks = warm.start_ranks(words, 2, environment())
    try:
        while not (folder / "exits").exists():
            assert ranks[exiting].returncode is None
            time.sleep(0.01)
        began = time.monotonic()
        _, error = ranks[1 - exiting].communicate(60)
        seconds = time.monotonic() - began
        if not slow:
            ranks[exiting].wait(60)
    finally:
        for rank in ranks:
            rank.kill()
    return [rank.returncode for rank in ranks], error, seconds


def test_the_others_end_before_the_interpreter_of_a_rank_that_exits(tmp_path):
    codes, error, seconds = ended(tmp_path, 1, slow=60)
    assert codes[0] == 1
    assert "as rank 1 failed first: SystemExit: 3" in error
    assert seconds < 15


def test_its_exit_code_stays(tmp_path):
    codes, error, _ = ended(tmp_path, 0, slow=0)
    assert codes == [3, 1]
    assert "as rank 0 failed first: SystemExit: 3" in error
