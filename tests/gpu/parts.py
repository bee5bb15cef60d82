"""The parts of the lane for GPUs: what each runs, in which environment, and what came of it."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tests.compat.environments import ROOT
from tests.compat.lanes import COUNTS, outcome, within

RESULTS = ROOT / "build" / "gpu"
FIGURES = ROOT / "build" / "bench" / "cuda.json"
# A warning of a driver or of a library that this machine has is no failure.
NO_FAILURE = ("-W", "default")
LAUNCH = "launch"
BENCH = "bench"
# The tests of each part.
PARTS: dict[str, tuple[str, ...]] = {
    LAUNCH: ("tests/gpu/test_launch.py",),
    "float16": ("tests/distributed/precision/test_float16.py",),
    "contract": ("tests/distributed/strategies/test_contract.py",),
    "distributed": ("tests/distributed", "-m", "gpu"),
    "counts": tuple(COUNTS),
    "layers": ("tests/gpu/test_layers.py",),
    BENCH: (),
}
# The seconds after which each part is ended: all together are under half an hour.
LIMITS = {
    LAUNCH: 120,
    "float16": 120,
    "contract": 180,
    "distributed": 480,
    "counts": 180,
    "layers": 240,
    BENCH: 240,
}
# To look for devices must not load CUDA, where tests fork ranks. Who launches ranks from a notebook
# has not set it, so the part `launch` has not either.
NO_CUDA_TO_LOOK = {"PYTORCH_NVML_BASED_CUDA_CHECK": "1"}


def environment() -> dict[str, str]:
    """Returns the variables of the lane, which torch reads when it is imported."""
    return {
        "KERAS_BACKEND": "torch",
        **NO_CUDA_TO_LOOK,
        # Float32 is float32: cuDNN would take 10 bits of each factor, and tests compare.
        "NVIDIA_TF32_OVERRIDE": "0",
        # A test of more ranks than there are GPUs.
        "SHARDCORE_SHARE_GPUS": "1",
        # The same sums in each run.
        "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
    }


def run(chosen: Iterable[str]) -> dict[str, Any]:
    """Runs the parts, all of them if none is chosen.

    Returns the machine, what came of each part, and the figures. Parts that are not run have the
    results of the last run on such a machine.
    """
    RESULTS.mkdir(parents=True, exist_ok=True)
    parts, machine, file = list(chosen), _machine(), RESULTS / "found.json"
    found: dict[str, Any] = {"machine": machine, "parts": {}, "figures": []}
    if parts and file.exists():
        earlier = json.loads(file.read_text())
        found = earlier if earlier["machine"] == machine else found
    for part in parts or PARTS:
        found["parts"][part] = _bench() if part == BENCH else _tests(part)
        if part == BENCH:
            found["figures"] = json.loads(FIGURES.read_text())["rows"]
        found["day"] = time.strftime("%Y-%m-%d")
        file.write_text(json.dumps(found, indent=1))
    return found


def _tests(part: str) -> dict[str, Any]:
    paths = [str(ROOT / "src"), str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    variables = {**os.environ, **environment(), "PYTHONPATH": os.pathsep.join(paths)}
    if part == LAUNCH:
        variables = {name: variables[name] for name in variables.keys() - NO_CUDA_TO_LOOK}
    folder, tests = RESULTS / part, [*NO_FAILURE, *PARTS[part]]
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
