"""Kills a rank at random moments of its saves: the file is the old one or the new one, complete.

KERAS_BACKEND=torch python -m tests.faults.saves     20 kills of each kind, on one rank and on two
"""

import argparse
import os
import random
import subprocess
import tempfile
import time
from itertools import count
from pathlib import Path

import keras
import numpy as np
import pytest

import shardcore
from shardcore.testing import RankFailed, run_ranks

# What is saved, and the names that are left when a save is complete.
KINDS = {
    "model.keras": ["model.keras"],
    "model.weights.h5": ["model.weights.h5"],
    "BackupAndRestore": ["latest.weights.h5", "training_metadata.json"],
    "checkpoint": ["step-01000000"],
    "checkpoint of the same step": ["step-00000007"],
}
X = np.zeros((1, 64), "float32")
# A kill comes at most so many times the seconds of a save after the begin of the third one.
LATEST = 1.5


def distribute(ranks):
    shardcore.install("single" if ranks == 1 else "dtensor")
    mesh = keras.distribution.DeviceMesh((1, ranks), ("data", "model"))
    rules = keras.distribution.LayoutMap(mesh)
    rules[".*kernel"] = (None, "model")
    keras.distribution.set_distribution(
        keras.distribution.ModelParallel(layout_map=rules, batch_dim_name="data")
    )


def build():
    assert keras.distribution.distribution() is not None
    model = keras.Sequential([keras.Input((64,)), *(keras.layers.Dense(64) for _ in range(4))])
    model.compile(keras.optimizers.SGD(0.0), "mse")
    return model


def fill(model, value):
    """Makes every weight `value`: parts of two saves are found out."""
    model.set_weights([np.full_like(each, value) for each in model.get_weights()])


def value_of(model):
    """Returns the value of every weight."""
    values = np.unique(np.concatenate([each.ravel() for each in model.get_weights()]))
    assert len(values) == 1, f"a mixture of the saves {values}"
    return int(values[0])


def save(kind, folder, model, number):
    if kind == "checkpoint":
        shardcore.save_checkpoint(folder, model, step=number, keep=1)
    elif kind == "checkpoint of the same step":
        shardcore.save_checkpoint(folder, model, step=7, keep=1)
    elif kind == "model.keras":
        model.save(folder / kind)
    else:
        model.save_weights(folder / kind)


def load(kind, folder):
    """Returns a model with what is saved."""
    if kind == "model.keras":
        return keras.saving.load_model(folder / kind)
    model = build()
    if kind.startswith("checkpoint"):
        shardcore.load_checkpoint(folder, model)
    else:
        model.load_weights(folder / kind)
    return model


class Fill(keras.callbacks.Callback):
    """Makes the number of each epoch the value of every weight, and tells when it is saved."""

    def __init__(self, tell):
        super().__init__()
        self.tell = tell

    def on_epoch_begin(self, epoch, logs=None):
        self.tell("saved", epoch - 1)
        fill(self.model, epoch)
        self.tell("begins", epoch)


class First(keras.callbacks.Callback):
    """Ends a fit after its first epoch, whose number and first weights it keeps."""

    def on_epoch_begin(self, epoch, logs=None):
        self.epoch, self.value = epoch, value_of(self.model)

    def on_epoch_end(self, epoch, logs=None):
        self.model.stop_training = True


def fit(folder, *callbacks):
    backup = keras.callbacks.BackupAndRestore(folder, delete_checkpoint=False)
    build().fit(X, X, epochs=10**6, verbose=0, callbacks=[*callbacks, backup])


def save_until_killed(rank, ranks, kind, folder, victim, delay):
    """Saves larger and larger values; a process from outside kills `victim` in the third save."""
    distribute(ranks)
    times = {}

    def tell(what, number):
        times[what] = time.monotonic()
        if rank == 0:
            with folder.with_suffix(".saves").open("a") as log:
                log.write(f"{what} {number}\n")
        if rank == victim and (what, number) == ("saved", 1):
            seconds = delay * (times["saved"] - times["begins"])
            subprocess.Popen(["sh", "-c", f"sleep {seconds:.4f}; kill -9 {os.getpid()}"])

    if kind == "BackupAndRestore":
        fit(folder, Fill(tell))
    model = build()
    for number in count():
        fill(model, number)
        tell("begins", number)
        save(kind, folder, model, number)
        tell("saved", number)


def found_after(_rank, ranks, kind, folders):
    """Returns for each folder the value that is saved, and the names after another save."""
    distribute(ranks)
    found = []
    for folder in folders:
        if kind == "BackupAndRestore":
            fit(folder, first := First())
            assert first.epoch == first.value + 1, f"epoch {first.epoch} of save {first.value}"
            value = first.value
        else:
            value = value_of(model := load(kind, folder))
            save(kind, folder, model, 10**6)
        found.append((value, sorted(os.listdir(folder))))
    return found


def run(kind, ranks, kills, seed=0):
    """Kills a rank so many times; returns how often a save was under way."""
    chosen, folders, while_saving = random.Random(seed), [], 0
    with tempfile.TemporaryDirectory(prefix="shardcore-faults-") as base:
        for number in range(kills):
            folders.append(folder := Path(base) / str(number))
            folder.mkdir()
            victim, delay = chosen.randrange(ranks), chosen.uniform(0, LATEST)
            with pytest.raises(RankFailed, match=f"rank {victim} ended without a result"):
                run_ranks(save_until_killed, ranks, ranks, kind, folder, victim, delay)
        for found in run_ranks(found_after, ranks, ranks, kind, folders, timeout=60 + 10 * kills):
            for folder, (value, names) in zip(folders, found, strict=True):
                lines = folder.with_suffix(".saves").read_text().split()
                least, most = (
                    max(int(n) for w, n in zip(lines[::2], lines[1::2], strict=True) if w == what)
                    for what in ("saved", "begins")
                )
                assert least <= value <= most, f"save {value} after {least}, before {most}"
                assert names == KINDS[kind], f"left behind: {names}"
                while_saving += least < most
    return while_saving // ranks


def main():
    words = argparse.ArgumentParser(prog="python -m tests.faults.saves", description=__doc__)
    words.add_argument("--kills", type=int, default=20)
    words.add_argument("--only", choices=KINDS, nargs="+", default=KINDS)
    words.add_argument("--seed", type=int, default=0)
    given = words.parse_args()
    for kind in given.only:
        for ranks in (1, 2):
            saving = run(kind, ranks, given.kills, given.seed)
            what = f"{given.kills} kills on {ranks} ranks, {saving} while saving"
            print(f"{kind}: {what}; the old or the new one, nothing left behind", flush=True)


if __name__ == "__main__":
    main()
