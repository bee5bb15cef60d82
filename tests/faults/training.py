"""Trains, and resumes where a start before it was killed: FOLDER, kind of checkpoint, epochs.

Each rank writes its process number, so that it can be killed, and rank 0 each step that it begins.
"""

import os
import sys
import time
from pathlib import Path

import keras

import shardcore

BATCH, ROWS = 16, 64
STEPS = ROWS // BATCH  # in an epoch
# So many seconds a step takes at least: kills meet every part of an epoch.
PAUSE = 0.02


class Progress(keras.callbacks.Callback):
    """Writes the number of steps that are done, before each step."""

    def __init__(self, path):
        super().__init__()
        self.path = path

    def on_epoch_begin(self, epoch, logs=None):
        self.epoch = epoch

    def on_train_batch_begin(self, batch, logs=None):
        with self.path.open("a") as file:
            file.write(f"{self.epoch * STEPS + batch}\n")

    def on_train_batch_end(self, batch, logs=None):
        time.sleep(PAUSE)


def saver(kind, folder):
    if kind == "BackupAndRestore":
        return keras.callbacks.BackupAndRestore(folder / "backup", delete_checkpoint=False)
    return shardcore.ShardedCheckpoint(folder / "checkpoints", every_steps=3, keep=2)


def train(folder, epochs, *callbacks):
    """Trains a model whose dropout and shuffling draw numbers, and writes its weights."""
    ranks = keras.distribution.get_device_count()
    mesh = keras.distribution.DeviceMesh((1, ranks), ("data", "model"))
    rules = keras.distribution.LayoutMap(mesh)
    rules[".*hidden/kernel"] = (None, "model")
    keras.distribution.set_distribution(
        keras.distribution.ModelParallel(layout_map=rules, batch_dim_name="data")
    )
    keras.utils.set_random_seed(1)
    hidden, dropout = keras.layers.Dense(16, name="hidden"), keras.layers.Dropout(0.3)
    model = keras.Sequential([keras.Input((8,)), hidden, dropout, keras.layers.Dense(1)])
    model.compile(keras.optimizers.Adam(0.01), "mse")
    x = keras.random.uniform((ROWS, 8), seed=1)
    model.fit(x, x[:, :1], batch_size=BATCH, epochs=epochs, verbose=0, callbacks=list(callbacks))
    model.save_weights(folder / "end.weights.h5")


def train_undisturbed(_rank, folder, epochs):
    shardcore.install()
    train(folder, epochs)


def main():
    shardcore.install()
    folder, kind, epochs = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
    start, rank = os.environ["TORCHELASTIC_RESTART_COUNT"], os.environ["RANK"]
    own = folder / f"pid-{start}-{rank}"
    own.with_suffix(".unfinished").write_text(str(os.getpid()))
    own.with_suffix(".unfinished").rename(own)
    progress = [Progress(folder / f"steps-{start}")] if rank == "0" else []
    # The progress comes first: a step that is counted may be lost, a step that is saved not.
    train(folder, epochs, *progress, saver(kind, folder))


if __name__ == "__main__":
    main()
