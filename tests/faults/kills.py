"""Kills ranks at random moments of a training that torchrun restarts, and compares the weights.

python -m tests.faults.kills                      20 kills with each kind of checkpoint
python -m tests.faults.kills --kills 3 --only BackupAndRestore
"""

import argparse
import json
import os
import random
import signal
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import attrs
import h5py
import numpy as np

from shardcore.testing import run_ranks
from tests import warm
from tests.faults import training
from tests.faults.kinds import Kind, tried

KINDS = ("BackupAndRestore", "ShardedCheckpoint")
# The folders that exist only while a file or a checkpoint is written.
UNFINISHED = ("backup/.unfinished-*", "checkpoints/.unfinished-*")
# Of every so many kills one waits until something is written after a complete save.
WHILE_SAVING = 3
# The others come at most so many seconds after a start, which builds and loads first.
LATEST = 5.0
PATIENCE = 240.0
# The epochs for each kill: the training must not end before the last one.
EPOCHS = 40


@attrs.define
class Job:
    """A training under torchrun.

    Args:
        folder: Where it writes.
        ranks: How many there are.
        process: torchrun.
        saved: For each kill, the steps that complete checkpoints had before it.
        while_saving: How many kills met an unfinished file.
    """

    folder: Path
    ranks: int
    process: warm.Program
    saved: list[int] = attrs.Factory(list)
    while_saving: int = 0

    def kill(self, chosen: random.Random, wait_for_save: bool) -> None:
        """Kills one rank of the present start with SIGKILL."""
        own = [self.folder / f"pid-{len(self.saved)}-{rank}" for rank in range(self.ranks)]
        self._wait(lambda: all(each.exists() for each in own), pause=0.02)
        if wait_for_save:
            self._wait(lambda: steps_saved(self.folder) > 0, pause=0.005)
            self._wait(self._is_saving)
        else:
            time.sleep(chosen.uniform(0, LATEST))
        self.saved.append(steps_saved(self.folder))
        self.while_saving += self._is_saving()
        os.kill(int(chosen.choice(own).read_text()), signal.SIGKILL)

    def finish(self) -> None:
        """Waits until the training ends, which it must do well."""
        assert self.process.wait(PATIENCE) == 0, f"the training failed:{self._log()}"

    def _is_saving(self) -> bool:
        return any(any(self.folder.glob(each)) for each in UNFINISHED)

    def _wait(self, is_so: Callable[[], bool], pause: float = 0.0005) -> None:
        deadline = time.monotonic() + PATIENCE
        while not is_so():
            code = self.process.returncode
            assert code is None, f"the training has ended, exit code {code}:{self._log()}"
            assert time.monotonic() < deadline, f"the training stands still:{self._log()}"
            time.sleep(pause)

    def _log(self) -> str:
        return "\n" + (self.folder / "log").read_text()[-3000:]


@contextmanager
def started(folder: Path, kind: str, ranks: int, epochs: int, restarts: int) -> Iterator[Job]:
    """Runs the training under torchrun, and ends it at the end of the context."""
    options = [f"--nproc_per_node={ranks}", f"--max-restarts={restarts}", "--standalone"]
    script = [training.__file__, str(folder), kind, str(epochs)]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "KERAS_BACKEND": "torch"}
    with (folder / "log").open("a") as log:
        process = warm.start_torchrun([*options, *script], environment, output=log.fileno())
        try:
            yield Job(folder, ranks, process)
        finally:
            if process.returncode is None:
                process.terminate()  # which ends the ranks too
                process.wait(PATIENCE)


def steps_saved(folder: Path) -> int:
    """Returns the steps of the newest complete save, by the names and files that Keras has."""
    steps = [int(each.name.removeprefix("step-")) for each in folder.glob("checkpoints/step-*")]
    metadata = folder / "backup" / "training_metadata.json"
    if metadata.exists():
        steps.append(json.loads(metadata.read_text())["epoch"] * training.STEPS)
    return max(steps, default=0)


def check_lost(folder: Path, saved: list[int]) -> int:
    """Compares where each start went on with what was saved before; returns the steps lost."""
    lost = reached = 0
    for start in range(len(saved) + 1):
        path = folder / f"steps-{start}"
        done = [int(each) for each in path.read_text().split()] if path.exists() else []
        if done:
            most = max(saved[:start], default=0)
            assert done[0] >= most, f"start {start} begins at {done[0]}, with {most} saved"
            assert done == list(range(done[0], done[-1] + 1)), f"start {start} leaves out a step"
            lost, reached = lost + max(reached - done[0], 0), done[-1]
    return lost


def weights(path: Path) -> dict[str, np.ndarray]:
    """Returns the arrays of a file of weights, by their names in it."""
    found = {}
    with h5py.File(path) as file:
        file.visititems(
            lambda name, each: found.update({name: each[()]} if hasattr(each, "dtype") else {})
        )
    return found


def compare(folder: Path, expected: dict[str, np.ndarray], tolerance: float) -> None:
    """Compares the weights at the end with those of an undisturbed run."""
    found = weights(folder / "end.weights.h5")
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_allclose(found[name], value, rtol=0, atol=tolerance, err_msg=name)


def undisturbed(folder: Path, ranks: int, epochs: int) -> dict[str, np.ndarray]:
    """Returns the weights of a run without kills and checkpoints."""
    run_ranks(training.train_undisturbed, ranks, folder, epochs, timeout=PATIENCE)
    return weights(folder / "end.weights.h5")


def run(
    kind: str, kills: int, seed: int = 0, epochs_each: int = EPOCHS, every: int = WHILE_SAVING
) -> list[Kind]:
    """Kills ranks of one training of two, each `every`-th while it saves.

    The training ends with the weights of an undisturbed run.

    Returns:
        The kinds of kills, by the moment.
    """
    chosen, epochs = random.Random(seed), epochs_each * (kills + 1)
    with tempfile.TemporaryDirectory(prefix="shardcore-faults-") as base:
        folder = Path(base)
        expected = undisturbed(folder, 2, epochs)
        with started(folder, kind, 2, epochs, restarts=kills) as job:
            for number in range(kills):
                job.kill(chosen, wait_for_save=number % every == every - 1)
            job.finish()
        compare(folder, expected, 1e-6)
        lost = check_lost(folder, job.saved)
    print(f"{kind}: {lost} of {epochs * training.STEPS} steps trained again", flush=True)
    met = {"while saving": job.while_saving, "between saves": kills - job.while_saving}
    return [Kind(f"{kind}, a kill {when}", times, times) for when, times in met.items() if times]


def run_on_fewer(kind: str, seed: int = 0) -> list[Kind]:
    """Kills one of four ranks, and goes on with two; returns the kind."""
    with tempfile.TemporaryDirectory(prefix="shardcore-faults-") as base:
        folder = Path(base)
        expected = undisturbed(folder, 4, EPOCHS)
        with started(folder, kind, 4, EPOCHS, restarts=0) as job_of_four:
            job_of_four.kill(random.Random(seed), wait_for_save=True)
            job_of_four.process.wait(PATIENCE)
        (folder / "steps-0").unlink()  # of the first start on four
        with started(folder, kind, 2, EPOCHS, restarts=0) as job:
            job.finish()
        assert int((folder / "steps-0").read_text().split()[0]) >= job_of_four.saved[0] > 0
        compare(folder, expected, 1e-5)
    return [Kind(f"{kind}, killed on 4 ranks, resumed on 2", 1, 1)]


def kinds(kills: int, seed: int = 0, only: Iterable[str] = KINDS) -> Iterator[Kind]:
    """Yields the kinds of kills for each kind of checkpoint."""
    warm.load()
    for kind in only:
        yield from tried(f"{kind}, kills", kills, partial(run, kind, kills, seed))
        fewer = f"{kind}, killed on 4 ranks, resumed on 2"
        yield from tried(fewer, 1, partial(run_on_fewer, kind, seed))


def main() -> None:
    """Prints a line for each kind."""
    parser = argparse.ArgumentParser(prog="python -m tests.faults.kills", description=__doc__)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--only", choices=KINDS, nargs="+", default=KINDS)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    for kind in kinds(given.kills, given.seed, given.only):
        print(kind, flush=True)


if __name__ == "__main__":
    main()
