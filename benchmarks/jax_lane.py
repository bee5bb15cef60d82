"""Keras on JAX, in a separate environment: two CPU devices, which share one process."""

import json
import os
import select
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs

from benchmarks.cases import Case
from benchmarks.lanes import LOGS, TIMEOUT, LaneFailed

PYTHON = Path("build/bench-jax/bin/python")
FLAGS = "--xla_force_host_platform_device_count={} --xla_cpu_multi_thread_eigen=false"


def is_installed() -> bool:
    """Returns whether `make bench-jax` has made the environment."""
    return PYTHON.exists()


class JaxLane:
    """A process of another interpreter, which speaks JSON by lines."""

    def __init__(self, case: Case, layout: str, work: str) -> None:
        LOGS.mkdir(parents=True, exist_ok=True)
        self._log = LOGS / f"{case.name}-{layout}-{work}-jax.txt".replace(" ", "-")
        devices = 1 if layout == "whole" else 2
        environment = {**os.environ, "KERAS_BACKEND": "jax", "XLA_FLAGS": FLAGS.format(devices)}
        with self._log.open("w") as log:
            self._process = subprocess.Popen(
                [str(PYTHON), "-m", "benchmarks.jax_rank", str(devices)],
                env=environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )
        try:
            self.ask(attrs.asdict(case), layout, work)
        except LaneFailed:
            self.close()
            raise

    def ask(self, *request: Any) -> Any:
        try:
            print(json.dumps(request), file=self._process.stdin, flush=True)
        except BrokenPipeError:
            raise LaneFailed(f"JAX has ended, see {self._log}") from None
        if not select.select([self._process.stdout], [], [], TIMEOUT)[0]:
            raise LaneFailed(f"no answer in {TIMEOUT:.0f} seconds, see {self._log}")
        line = self._process.stdout.readline()
        if not line:
            raise LaneFailed(f"JAX has ended, see {self._log}")
        answer = json.loads(line)
        if "failure" in answer:
            raise LaneFailed(f"{answer['failure'].splitlines()[-1]} ({self._log})")
        return answer["answer"]

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()


def open_jax(layout: str, work: str = "train") -> Callable[[Case, str], JaxLane]:
    """A way to open a lane for a case that trains or generates; the device is always the CPU."""
    return lambda case, device: JaxLane(case, layout, work)
