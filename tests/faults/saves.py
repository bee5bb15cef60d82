"""Kills a rank at random moments of its saves: the file is the old one or the new one, complete.

KERAS_BACKEND=torch python -m tests.faults.saves --kills 20 --only model.h5 checkpoint
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

from shardcore.testing import RankFailed, run_ranks
from tests import warm
from tests.faults.kinds import Kind
from tests.faults.ways import STEPS, WAYS, X, build, distribute, is_resumed, load, save, saver

# A kill comes at most so many times the seconds of a save after the begin of the third one.
LATEST = 1.5


def fill(model, value):
    """Makes every weight `value`: parts of two saves are found out."""
    model.set_weights([np.full_like(weight, value) for weight in model.get_weights()])


def value_of(model):
    """Returns the value of every weight."""
    values = np.unique(np.concatenate([weight.ravel() for weight in model.get_weights()]))
    assert len(values) == 1, f"a mixture of the saves {values}"
    return int(values[0])


class Fill(keras.callbacks.Callback):
    """Makes the number of the next save the value of every weight, and tells when it is saved."""

    def __init__(self, every, unfinished, tell):
        super().__init__()
        self.every, self.unfinished, self.tell = every, unfinished, tell

    def on_epoch_begin(self, epoch, logs=None):
        self.epoch = epoch

    def on_train_batch_begin(self, batch, logs=None):
        number, place = divmod(self.epoch * STEPS + batch, self.every)
        if place == 0:
            self.tell("saved", number - 1 - self.unfinished)
            fill(self.model, number)
        if place == self.every - 1:
            self.tell("begins", number)


class First(keras.callbacks.Callback):
    """Ends a fit after a save; keeps the number of its first step, and the weights there."""

    def __init__(self, every):
        super().__init__()
        self.every, self.begun = every, []

    def on_epoch_begin(self, epoch, logs=None):
        self.epoch = epoch

    def on_train_batch_begin(self, batch, logs=None):
        if not self.begun:
            self.value = value_of(self.model)
        self.begun.append(self.epoch * STEPS + batch)

    def on_epoch_end(self, epoch, logs=None):
        self.model.stop_training = len(self.begun) >= self.every


def fit(*callbacks):
    build().fit(X, X, batch_size=1, epochs=10**6, verbose=0, callbacks=callbacks)


def save_until_killed(rank, ranks, way, folder, victim, delay):
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

    if WAYS[way].every is not None:
        fit(Fill(WAYS[way].every, WAYS[way].unfinished, tell), saver(way, folder))
    model = build()
    for number in count():
        fill(model, number)
        tell("begins", number)
        save(way, folder, model, number)
        tell("saved", number)


def value_after(way, folder):
    """Returns the value that is saved, after another save."""
    if not is_resumed(way):
        model = load(way, folder)
        value = value_of(model)
        save(way, folder, model, 10**6)
        return value
    every = WAYS[way].every
    fit(first := First(every), saver(way, folder))
    step = (first.value + 1) * every
    assert first.begun[0] == step, f"save {first.value} goes on at step {first.begun[0]}"
    return first.value


def found_after(_rank, ranks, way, folders):
    """Returns for each folder the value that is saved, or an error, and the names at the end."""
    distribute(ranks)
    found = []
    for folder in folders:
        try:
            value = value_after(way, folder)
        except Exception as error:  # noqa: BLE001 - it is reported
            value = f"{type(error).__name__}: {error}"
        found.append((value, sorted(os.listdir(folder))))
    return found


def problem_of(way, value, names, least, most):
    """Returns what is wrong after a kill; None if the old or the new save is complete."""
    if isinstance(value, str):
        return value
    if not least <= value <= most:
        return f"save {value} after {least}, before {most}"
    return None if WAYS[way].is_left(names) else f"left behind: {names}"


def saves_before_kill(folder):
    """Returns the last save that was complete, and the last one that began, before a kill."""
    rows = [line.split() for line in folder.with_suffix(".saves").read_text().splitlines()]
    return [
        max(int(number) for what, number in rows if what == event) for event in ("saved", "begins")
    ]


def run(way, ranks, kills, seed=0):
    """Kills a rank so many times; returns the kind, with the number of kills in a save."""
    chosen, folders, while_saving = random.Random(seed), [], 0
    with tempfile.TemporaryDirectory(prefix="shardcore-faults-") as base:
        for number in range(kills):
            folders.append(folder := Path(base) / str(number))
            folder.mkdir()
            victim, delay = chosen.randrange(ranks), chosen.uniform(0, LATEST)
            with pytest.raises(RankFailed, match=f"rank {victim} ended without a result"):
                run_ranks(save_until_killed, ranks, ranks, way, folder, victim, delay)
        of_ranks = run_ranks(found_after, ranks, ranks, way, folders, timeout=60 + 10 * kills)
        outcomes = []
        for folder, *of_folder in zip(folders, *of_ranks, strict=True):
            least, most = saves_before_kill(folder)
            while_saving += least + WAYS[way].unfinished < most
            names = of_folder[0][1]  # rank 0 puts away what is left, and others may be before it
            problems = [problem_of(way, value, names, least, most) for value, _ in of_folder]
            outcomes.append(next(filter(None, problems), None))
    name = f"{way}, {'one rank' if ranks == 1 else f'{ranks} ranks'}"
    print(f"{name}: {while_saving} of {kills} kills while saving", flush=True)
    return Kind.of(name, outcomes)


def kinds(kills, seed=0, only=WAYS):
    """Yields each way to save, on one rank and on two."""
    warm.load()
    for way in only:
        for ranks in (1, 2):
            yield run(way, ranks, kills, seed)


def main():
    words = argparse.ArgumentParser(prog="python -m tests.faults.saves", description=__doc__)
    words.add_argument("--kills", type=int, default=20)
    words.add_argument("--only", choices=WAYS, nargs="+", default=WAYS)
    words.add_argument("--seed", type=int, default=0)
    given = words.parse_args()
    for kind in kinds(given.kills, given.seed, given.only):
        print(kind, flush=True)


if __name__ == "__main__":
    main()
