"""Measures steps while sharded checkpoints are written, beside steps without.

python -m benchmarks.saving

Two ranks train an MLP, with a checkpoint every few steps and without, in turns. A step that copies
is counted separately: it pays the copy to the memory of the host. The threads that write need
processor time too, so on as many cores as ranks the other steps share theirs with them.
"""

import os

os.environ["KERAS_BACKEND"] = "torch"
os.environ["OMP_NUM_THREADS"] = "1"

import tempfile
import time

import keras
import numpy as np

import shardcore
from shardcore.testing import run_ranks

RANKS, WIDTH, LAYERS, ROWS = 2, 1536, 4, 256
STEPS, EVERY, ROUNDS = 24, 12, 3


class Times(keras.callbacks.Callback):
    """The seconds from the begin of one step to that of the next: on the clock, and of the core.

    The second figure is the time of the main thread on a processor. Other work on the machine, the
    threads that write included, does not change it.
    """

    def __init__(self):
        super().__init__()
        self.of_steps = []

    def on_train_begin(self, logs=None):
        self.before = self._now()

    def on_train_batch_begin(self, batch, logs=None):
        now = self._now()
        self.of_steps.append(now - self.before)
        self.before = now

    def _now(self):
        return np.array([time.perf_counter(), time.thread_time()])


def measure(rank, directory):
    """Returns the times of steps without saving, of steps that copy, and of the others."""
    shardcore.install("dtensor")
    mesh = keras.distribution.DeviceMesh((1, RANKS), ("data", "model"))
    rules = keras.distribution.LayoutMap(mesh)
    rules[".*kernel"] = (None, "model")
    keras.distribution.set_distribution(
        keras.distribution.ModelParallel(layout_map=rules, batch_dim_name="data")
    )
    model = keras.Sequential([keras.Input((WIDTH,))])
    for _ in range(LAYERS):
        model.add(keras.layers.Dense(WIDTH, "relu"))
    model.compile("adam", "mse")
    x = np.random.default_rng(0).normal(size=(ROWS * STEPS, WIDTH)).astype("float32")
    plain, copying, others = [], [], []
    for turn in range(2 * ROUNDS + 1):
        times = Times()
        saver = shardcore.ShardedCheckpoint(directory, every_steps=EVERY, keep=1, resume=False)
        both = [times, saver] if turn % 2 == 0 else [times]
        model.fit(x, x, batch_size=ROWS, epochs=1, verbose=0, shuffle=False, callbacks=both)
        if turn == 0:
            continue  # recorded, and warmed up
        if turn % 2:
            plain += times.of_steps[1:]
        else:
            # the time of a step ends when the next one begins, so it has the copy after it
            copying += times.of_steps[EVERY::EVERY]
            others += [t for n, t in enumerate(times.of_steps) if n and n % EVERY]
    return plain, copying, others, sum(v.nbytes for v in map(np.asarray, model.get_weights()))


def main():
    with tempfile.TemporaryDirectory() as directory:
        plain, copying, others, nbytes = run_ranks(measure, RANKS, directory, timeout=300)[0]
    print(f"{3 * nbytes / 2**20:.0f} MiB of weights and moments, {RANKS} ranks", os.getloadavg())
    medians = {}
    for name, times in (("without", plain), ("others", others), ("copying", copying)):
        medians[name] = np.median(times, axis=0)
        clock, core = 1e3 * medians[name]
        print(f"{name:8} {len(times)} steps: median {clock:.1f} ms, main thread {core:.1f} ms")
    clock, core = medians["others"] / medians["without"]
    print(f"others / without: {clock:.3f}, main thread {core:.3f}")


if __name__ == "__main__":
    main()
