"""Asks Keras on JAX, in its own environment, what XLA makes one device send."""

import json
import os
import select
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

from benchmarks.jax_lane import PYTHON
from benchmarks.traffic.models import RANKS, Mesh

LOG = Path("build/bench/logs/traffic-jax.txt")
TIMEOUT = 300.0  # seconds for one case
CRASHED = {"failure": "the process of JAX has ended"}
FLAGS = (
    "--xla_force_host_platform_device_count={} --xla_dump_to={} --xla_dump_hlo_as_text "
    "--xla_dump_hlo_module_re=.*train_step.*"
)


def run(mesh: Mesh, names: Sequence[str]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Compile each case on the mesh; yield its name and what XLA sends, or why there is nothing.

    All cases share one process. One that ends the process costs itself alone.
    """
    left = list(names)
    LOG.parent.mkdir(parents=True, exist_ok=True)
    while left:
        for answer in _ask(mesh, tuple(left)):
            yield left.pop(0), answer
        if left:
            yield left.pop(0), CRASHED


def versions() -> dict[str, str]:
    """Tell the versions of JAX and Keras in the environment of Keras on JAX."""
    folders = [str(each) for each in PYTHON.parents[1].glob("lib/python*/site-packages")]
    found = {each.name: each.version for each in distributions(path=folders)}
    return {name: found[name] for name in ("jax", "jaxlib", "keras")}


def _ask(mesh: Mesh, names: tuple[str, ...]) -> Iterator[dict[str, Any]]:
    """Yield an answer for each case, until the process ends or hangs."""
    with tempfile.TemporaryDirectory() as folder, LOG.open("a") as log:
        environment = {
            **os.environ,
            "KERAS_BACKEND": "jax",
            "JAX_PLATFORMS": "cpu",
            "XLA_FLAGS": FLAGS.format(RANKS, folder),
        }
        process = subprocess.Popen(
            [str(PYTHON), "-m", "benchmarks.traffic.jax_rank"],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
        )
        assert process.stdin
        assert process.stdout
        try:
            request = {"mesh": mesh.name, "folder": folder, "cases": names}
            print(json.dumps(request), file=process.stdin, flush=True)
            for _ in names:
                if not select.select([process.stdout], [], [], TIMEOUT)[0]:
                    return
                if not (line := process.stdout.readline()):
                    return
                yield json.loads(line)
        finally:
            process.kill()
            process.communicate()
