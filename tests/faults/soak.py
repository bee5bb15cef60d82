"""Trains in small steps for long on two ranks, and compares what a rank holds with minute five.

python -m tests.faults.soak                 an hour
python -m tests.faults.soak --minutes 15
"""

import argparse
import gc
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import attrs
import keras
import torch

import shardcore
from shardcore.adapters.ranks.job.forked_ranks import free_port
from tests.faults.kinds import Kind

RANKS, BATCH, ROWS = 2, 16, 1024
# The minutes until the memory of a rank is taken as that of the steady state.
WARM_MINUTES = 5.0
# By how much the resident memory may have grown since then.
MOST = 0.01
BETWEEN_SECONDS = 10.0
# What may not grow on a rank; the memory may do so by MOST.
# Else the step of the validation is captured where that pays, which may be after minute five: its
# program holds 17 tensors.
AT_ONCE = {"SHARDCORE_CAPTURE": "at-once"}
GROWING = ("memory", "descriptors", "threads", "tensors")


@attrs.frozen
class Sample:
    """A look at a rank at one moment.

    Args:
        minute: The moment, in minutes since the begin.
        memory: The resident memory in MiB.
        descriptors: The number of open files.
        tensors: The number of tensors.
        threads: The numbers of the threads.
    """

    minute: float
    memory: float
    descriptors: int
    tensors: int
    threads: frozenset[int]

    @classmethod
    def now(cls, began: float) -> "Sample":
        """Returns what this process holds."""
        gc.collect()
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        return cls(
            round((time.monotonic() - began) / 60, 2),
            round(pages * os.sysconf("SC_PAGE_SIZE") / 2**20, 1),
            len(os.listdir("/proc/self/fd")),
            _count_tensors(),
            # Python lists a thread of gloo once it has called Python: the system lists all.
            frozenset(map(int, os.listdir("/proc/self/task"))) - _threads_for_callbacks(),
        )

    @classmethod
    def of_line(cls, line: str) -> "Sample":
        """Returns the sample that `line` has written."""
        minute, memory, descriptors, tensors, *threads = line.split()
        numbers = frozenset(map(int, threads))
        return cls(float(minute), float(memory), int(descriptors), int(tensors), numbers)

    def line(self) -> str:
        """Returns the sample as a line of text."""
        numbers = (self.minute, self.memory, self.descriptors, self.tensors, *self.threads)
        return " ".join(map(str, numbers)) + "\n"


def _threads_for_callbacks() -> frozenset[int]:
    """Returns the threads on which Keras runs callbacks at ends of batches.

    It starts another one whenever none is idle, up to four more than there are cores.
    """
    return frozenset(
        thread.native_id or 0
        for thread in threading.enumerate()
        if thread.name.startswith("ThreadPoolExecutor")
    )


def _count_tensors() -> int:
    """Counts the tensors of this process in a fork of it, which has no other thread.

    `gc.get_objects` refers to tuples that other threads are still filling, such as the one that
    writes checkpoints: they end in a SystemError (https://github.com/python/cpython/issues/59313).
    """
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        count = sum(issubclass(type(thing), torch.Tensor) for thing in gc.get_objects())
        os.write(write, str(count).encode())
        os._exit(0)
    os.waitpid(child, 0)
    os.close(write)
    with open(read) as file:
        return int(file.read())


@attrs.frozen
class Minute:
    """The most memory of a rank in a minute, and what it holds all the time."""

    memory: float
    descriptors: int
    tensors: int
    threads: int

    @classmethod
    def of(cls, samples: list[Sample], begin: float) -> "Minute":
        """Returns the minute that begins at `begin`.

        Threads that ask the store and write checkpoints come and go, with descriptors. So the least
        numbers of a minute count, and the threads that live all of it.
        """
        chosen = [sample for sample in samples if begin <= sample.minute <= begin + 1]
        return cls(
            max(sample.memory for sample in chosen),
            min(sample.descriptors for sample in chosen),
            min(sample.tensors for sample in chosen),
            len(frozenset.intersection(*(sample.threads for sample in chosen))),
        )


class Samples(keras.callbacks.Callback):
    """Writes samples at ends of epochs, until the time is over on a rank."""

    def __init__(self, minutes: float, path: Path) -> None:
        super().__init__()
        self.began, self.minutes, self.path, self.next = time.monotonic(), minutes, path, 0.0

    def on_epoch_end(self, epoch: int, logs: object = None) -> None:
        passed = time.monotonic() - self.began
        if passed >= self.next:
            self.next = passed + BETWEEN_SECONDS
            with self.path.open("a") as file:
                file.write(Sample.now(self.began).line())
        self.model.stop_training = shardcore.agree(passed > 60 * self.minutes)


def train(minutes: float, folder: Path) -> None:
    """Trains one rank, with a checkpoint now and then."""
    shardcore.install()
    mesh = keras.distribution.DeviceMesh((1, RANKS), ("data", "model"))
    rules = keras.distribution.LayoutMap(mesh)
    rules[".*hidden/kernel"] = (None, "model")
    keras.distribution.set_distribution(
        keras.distribution.ModelParallel(layout_map=rules, batch_dim_name="data")
    )
    model = keras.Sequential(
        [keras.Input((16,)), keras.layers.Dense(32, name="hidden"), keras.layers.Dense(1)]
    )
    model.compile("adam", "mse", metrics=["mae"])
    x = keras.random.uniform((ROWS, 16), seed=1)
    callbacks = [
        Samples(minutes, folder / f"samples-{os.environ['RANK']}"),
        shardcore.ShardedCheckpoint(folder / "checkpoints", every_minutes=1, keep=2),
    ]
    model.fit(
        x, x[:, :1], BATCH, epochs=10**9, verbose=0, callbacks=callbacks,
        validation_data=(x[:64], x[:64, :1]), validation_freq=20,
    )  # fmt: skip
    print(f"rank {os.environ['RANK']}: {int(model.optimizer.iterations)} steps", flush=True)


def grown(path: Path) -> list[str]:
    """Returns what has grown on a rank since minute five, and prints both minutes."""
    samples = [Sample.of_line(line) for line in path.read_text().splitlines()]
    first = Minute.of(samples, min(WARM_MINUTES, samples[-1].minute / 2))
    last = Minute.of(samples, samples[-1].minute - 1)
    print(f"{path.name}: {first}\n{path.name}: {last}", flush=True)
    allowed = attrs.asdict(first) | {"memory": (1 + MOST) * first.memory}
    return [
        f"{path.name}: {name}: {getattr(first, name)}, then {getattr(last, name)}"
        for name in GROWING
        if getattr(last, name) > allowed[name]
    ]


def run(minutes: float) -> list[str]:
    """Trains on ranks in new interpreters; returns what has grown."""
    job = {"WORLD_SIZE": str(RANKS), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    words = [sys.executable, "-m", "tests.faults.soak", "--minutes", str(minutes), "--rank-in"]
    with tempfile.TemporaryDirectory(prefix="shardcore-soak-") as folder:
        ranks = [
            subprocess.Popen(
                [*words, folder],
                env=os.environ | job | {"RANK": str(rank), "LOCAL_RANK": str(rank)} | AT_ONCE,
            )
            for rank in range(RANKS)
        ]
        try:
            codes = [rank.wait(60 * minutes + 300) for rank in ranks]
        finally:
            for rank in ranks:
                rank.kill()
        assert codes == [0] * RANKS, codes
        return [each for rank in range(RANKS) for each in grown(Path(folder) / f"samples-{rank}")]


def kinds(minutes: float) -> Iterator[Kind]:
    """Yields what may grow, on all ranks."""
    problems = run(minutes)
    for name in GROWING:
        grown_ones = [problem for problem in problems if f": {name}: " in problem]
        yield Kind(f"{name} of a rank", RANKS, RANKS - len(grown_ones), tuple(grown_ones))


def main() -> None:
    """Trains for an hour, and fails if something has grown."""
    parser = argparse.ArgumentParser(prog="python -m tests.faults.soak", description=__doc__)
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--rank-in", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.rank_in is not None:
        train(given.minutes, given.rank_in)
        return
    problems = run(given.minutes)
    sys.exit("\n".join(["it grows:", *problems]) if problems else 0)


if __name__ == "__main__":
    main()
