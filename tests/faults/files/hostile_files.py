"""Forges the index, the headers and the shards of a checkpoint, and reads it by the commands.

Each reading ends well or in a CheckpointError, within two seconds of processor time and 512 MiB.

python -m tests.faults.files.hostile_files     10,000 cases
"""

import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from argparse import Namespace
from pathlib import Path

from shardcore.adapters.checkpoints import conversion, folders, store
from shardcore.cli import checkpoints
from shardcore.domain.checkpoints.grid import Grid
from shardcore.domain.checkpoints.index import Index, StoredFile, StoredVariable
from shardcore.domain.errors import CheckpointError
from tests.faults.files import forgeries
from tests.faults.kinds import Kind, grouped

# Imported here, not in the first reading: they import torch and HDF5.
IMPORTED = (conversion, store)
SECONDS = 2  # of processor time, for one reading
PATIENCE = 30  # of the clock
MEBIBYTES = 512
STEP = "step-00000001"
GOOD = ("error", "read")
VARIABLES = 100_000
# For an index of so many variables.
LARGE_SECONDS, LARGE_MEBIBYTES = 20, 2048


class Late(BaseException):
    """A reading takes too long. It is no error that a reader may catch."""


def late(signum, frame):
    raise Late


def outcome(folder, target):
    """Returns how the commands end on a checkpoint: "error", "read", or what is wrong."""
    one = {"directory": folder, "json": False}
    ends = set()
    for options in (
        Namespace(action="inspect", **one),
        Namespace(action="inspect", **one | {"json": True}),
        Namespace(action="verify", **one),
        Namespace(action="convert", source=folder, target=target, max_shard_size=None),
    ):
        signal.setitimer(signal.ITIMER_PROF, SECONDS)
        signal.setitimer(signal.ITIMER_REAL, PATIENCE)
        try:
            checkpoints.run(options)
            ends.add("read")
        except CheckpointError as error:
            ends.add("error")
            if len(str(error)) > 20_000:
                return f"{options.action}: an error of {len(str(error))} characters"
        except (Late, Exception) as error:  # noqa: BLE001 - it is reported
            return f"{options.action}: {type(error).__name__}: {str(error)[:200]}"
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0)
            signal.setitimer(signal.ITIMER_REAL, 0)
            target.unlink(missing_ok=True)
    return "error" if "error" in ends else "read"


def limit_memory():
    """Lets this process have so many MiB more than it has, and returns the limit before."""
    status = dict(line.split(":") for line in Path("/proc/self/status").read_text().splitlines())
    now, before = int(status["VmData"].split()[0]) * 1024, resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (now + MEBIBYTES * 2**20, before[1]))
    return before


def run(cases, seed, large=50):
    """Returns kind and outcome of so many cases; one of `large` is a large one."""
    rng, found = random.Random(seed), []
    before = [signal.signal(each, late) for each in (signal.SIGPROF, signal.SIGALRM)]
    limits = limit_memory()
    try:
        with tempfile.TemporaryDirectory(prefix="shardcore-faults-") as base:
            forgeries.make(Path(base) / STEP)
            copy = Path(base) / "forged" / STEP
            for number in range(cases):
                shutil.copytree(Path(base) / STEP, copy)
                is_large = number % large == large - 1
                way = forgeries.be_large if is_large else rng.choice(forgeries.WAYS)
                resource.setrlimit(resource.RLIMIT_DATA, limits)
                kind = way(copy, rng)
                limit_memory()
                found.append((kind, outcome(copy, Path(base) / "converted.safetensors")))
                shutil.rmtree(copy.parent)
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, limits)
        for each, handler in zip((signal.SIGPROF, signal.SIGALRM), before, strict=True):
            signal.signal(each, handler)
    return found


def inspect_large():
    """Returns the seconds and MiB that the command takes for an index of many variables."""
    with tempfile.TemporaryDirectory(prefix="shardcore-faults-") as base:
        folder = Path(base) / STEP
        folder.mkdir()
        grid = Grid((64, 8), (tuple(range(0, 64, 8)), (0,)))
        variables = tuple(
            StoredVariable(f"layers/dense_{n}/vars/0", f"net/dense_{n}/kernel", "model", "float32",
                           "(model, None)", grid, tuple(range(8)))
            for n in range(VARIABLES)
        )  # fmt: skip
        files = []
        for number in range(8):
            file = folder / f"rank-{number:05}.safetensors"
            with file.open("wb") as empty:
                empty.truncate(VARIABLES * 64 * 8)
            files.append(StoredFile(file.name, VARIABLES * 64 * 8, "0" * 64))
        folders.write_index(folder, Index(1, "(model=8)", {}, variables, tuple(files), {}))
        began = time.monotonic()
        command = [sys.executable, "-m", "shardcore", "checkpoint", "inspect", base]
        with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
            shown = process.stdout.read().decode()
            _, status, used = os.wait4(process.pid, 0)
            process.returncode = status
        assert status == 0
        assert f"{VARIABLES} variables" in shown
        return time.monotonic() - began, used.ru_maxrss / 1024


def kinds(cases, seed=1):
    """Yields the kinds of forgery, and the inspection of a large index."""
    yield from grouped(run(cases, seed), GOOD)
    seconds, mebibytes = inspect_large()
    problem = f"{seconds:.1f} s, {mebibytes:.0f} MiB"
    held = seconds < LARGE_SECONDS and mebibytes < LARGE_MEBIBYTES
    name = f"inspect of {VARIABLES:,} variables of 8 pieces"
    yield Kind.once(name, None if held else problem)


if __name__ == "__main__":
    for kind in kinds(10_000):
        print(kind)
