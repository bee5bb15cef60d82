"""The parts of the lane for GPUs: what each runs, in which environment, and what came of it."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from tests.compat.environments import ROOT
from tests.compat.lanes import COUNTS, outcome, within

RESULTS = ROOT / "build" / "gpu"
FIGURES = ROOT / "build" / "bench" / "cuda.json"
# What the part `two` found, to send.
TWO_FILE = RESULTS / "two.json"
# A warning of a driver or of a library that this machine has is no failure.
NO_FAILURE = ("-W", "default")
LAUNCH = "launch"
BENCH = "bench"
TWO = "two"
# The tests of each part, in the order in which they run: the first say most in a short time.
PARTS: dict[str, tuple[str, ...]] = {
    LAUNCH: ("tests/gpu/test_launch.py", "tests/distributed/guides/test_notebook.py"),
    "float16": ("tests/distributed/precision/test_float16.py",),
    "input": ("tests/gpu/test_input.py", "tests/distributed/data/test_prefetch.py"),
    "contract": ("tests/distributed/strategies/test_contract.py",),
    "counts": tuple(COUNTS),
    BENCH: (),
    "layers": ("tests/gpu/test_layers.py",),
    "distributed": ("tests/distributed", "-m", "gpu"),
}
# What needs two GPUs, and runs if it is asked for: counts over NCCL, and `tests.gpu.two`.
OF_TWO = tuple(COUNTS)
# The seconds after which each part is ended: all but `two` together are under half an hour.
LIMITS = {
    LAUNCH: 180,
    "float16": 120,
    "input": 90,
    "contract": 180,
    "counts": 180,
    BENCH: 180,
    "layers": 240,
    "distributed": 390,
    TWO: 280,  # each of its two halves
}
# To look for devices must not load CUDA, where tests fork ranks. Who launches ranks from a notebook
# has not set it, so the part `launch` has not either.
NO_CUDA_TO_LOOK = {"PYTORCH_NVML_BASED_CUDA_CHECK": "1"}


def environment() -> dict[str, str]:
    """Returns the variables of the lane, which torch reads when it is imported."""
    return {
        "KERAS_BACKEND": "torch",
        # Tests and benchmarks have few steps.
        "SHARDCORE_CAPTURE": "at-once",
        **NO_CUDA_TO_LOOK,
        # Float32 is float32: cuDNN would take 10 bits of each factor, and tests compare.
        "NVIDIA_TF32_OVERRIDE": "0",
        # A test of more ranks than there are GPUs.
        "SHARDCORE_SHARE_GPUS": "1",
        # The same sums in each run.
        "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
    }


def run(chosen: Iterable[str]) -> Iterator[dict[str, Any]]:
    """Runs the parts, all of them but `two` if none is chosen.

    Yields after each part the machine, what came of the parts, and the figures. Parts that are not
    run have the results of the last run on such a machine.
    """
    RESULTS.mkdir(parents=True, exist_ok=True)
    parts, machine, file = list(chosen), _machine(), RESULTS / "found.json"
    found: dict[str, Any] = {"machine": machine, "parts": {}, "figures": []}
    if parts and file.exists():
        earlier = json.loads(file.read_text())
        found = earlier if earlier["machine"] == machine else found
    for part in parts or PARTS:
        found["parts"][part] = _part(part, machine)
        if part == BENCH:
            found["figures"] = json.loads(FIGURES.read_text())["rows"]
        found["day"] = time.strftime("%Y-%m-%d")
        file.write_text(json.dumps(found, indent=1))
        yield found


def _part(part: str, machine: dict[str, str]) -> dict[str, Any]:
    if part == BENCH:
        return _bench()
    return _two(machine) if part == TWO else _tests(part)


def _two(machine: dict[str, str]) -> dict[str, Any]:
    """Runs the part for two GPUs, and writes its file: counts, losses, step times, the machine."""
    counts, began = _tests(TWO), time.monotonic()
    steps = RESULTS / "two-steps.json"
    steps.unlink(missing_ok=True)
    variables = {name: os.environ[name] for name in os.environ.keys() - NO_CUDA_TO_LOOK}
    within([sys.executable, "-m", "tests.gpu.two", str(steps)], variables, LIMITS[TWO])
    found = json.loads(steps.read_text()) if steps.exists() else {"failed": ["tests.gpu.two"]}
    TWO_FILE.write_text(json.dumps({"machine": machine, "counts": counts, **found}, indent=1))
    counts["failed"] = [*counts["failed"], *found["failed"]]
    counts["passed"] += not found["failed"]
    counts["seconds"] += round(time.monotonic() - began)
    return counts


def _tests(part: str) -> dict[str, Any]:
    paths = [str(ROOT / "src"), str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    variables = {**os.environ, **environment(), "PYTHONPATH": os.pathsep.join(paths)}
    if part == LAUNCH:
        variables = {name: variables[name] for name in variables.keys() - NO_CUDA_TO_LOOK}
    folder, tests = RESULTS / part, [*NO_FAILURE, *(OF_TWO if part == TWO else PARTS[part])]
    folder.mkdir(exist_ok=True)
    return outcome(sys.executable, tests, variables, folder, LIMITS[part], _at_a_time())


def _at_a_time() -> int:
    """Returns how many tests run at once: each has up to four ranks, which load CUDA."""
    return min(max((os.cpu_count() or 2) * 3 // 4, 2), 12)


def _bench() -> dict[str, Any]:
    """Runs the benchmark with torch's own settings, which users have."""
    FIGURES.unlink(missing_ok=True)
    began = time.monotonic()
    unset = {"NVIDIA_TF32_OVERRIDE", "SHARDCORE_SHARE_GPUS", "CUBLAS_WORKSPACE_CONFIG"}
    variables = {name: value for name, value in os.environ.items() if name not in unset}
    command = [sys.executable, "-m", "benchmarks", "--only", "cuda"]
    code = within(command, variables, LIMITS[BENCH])
    if not FIGURES.exists():
        FIGURES.parent.mkdir(parents=True, exist_ok=True)
        FIGURES.write_text(json.dumps({"rows": []}))
    failed = ["make bench BENCH='--only cuda'"] if code != 0 else []
    seconds = round(time.monotonic() - began)
    return {"failed": failed, "skipped": 0, "passed": 1 - len(failed), "seconds": seconds}


def _machine() -> dict[str, str]:
    """Asks another process, since this one must not load CUDA."""
    program = Path(__file__).with_name("machine.py")
    done = subprocess.run([sys.executable, program], capture_output=True, text=True, check=True)
    machine: dict[str, str] = json.loads(done.stdout)
    return machine
