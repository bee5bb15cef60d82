"""Trains on two hosts of two ranks each that are network namespaces of this machine.

python -m tests.hosts
"""

import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from shardcore.testing import run_ranks
from tests.faults import training
from tests.faults.kills import KINDS, compare, steps_saved, weights
from tests.hosts.namespaces import Host, made, missing

HOSTS, RANKS, RATE = 2, 2, "200mbit"
EPOCHS = 20
TIMEOUT = 10  # seconds that a rank waits for the others
PATIENCE = 90.0


@contextmanager
def started(hosts: list[Host], folder: Path, kind: str) -> Iterator[list[subprocess.Popen]]:
    """Runs the training under torchrun on each host, and ends it at the end of the context."""
    env = {"OMP_NUM_THREADS": "1", "KERAS_BACKEND": "torch", "SHARDCORE_TIMEOUT": str(TIMEOUT)}
    meeting = ["--rdzv-backend=c10d", f"--rdzv-endpoint={hosts[0].name}:29400", "--rdzv-id=hosts"]
    ranks = [f"--nnodes={len(hosts)}", f"--nproc_per_node={RANKS}"]
    script = [training.__file__, str(folder), kind, str(EPOCHS)]
    command = [sys.executable, "-m", "torch.distributed.run", *ranks, *meeting, *script]
    agents = []
    try:
        for host in hosts:
            with (folder / f"log-{host.number}").open("w") as log:
                agents.append(
                    subprocess.Popen(
                        host.command(*command), stdout=log, stderr=log, env=os.environ | env
                    )
                )
        yield agents
    finally:
        for agent in agents:
            if agent.poll() is None:
                agent.terminate()  # which ends the ranks too
        for agent in agents:
            try:
                agent.wait(PATIENCE)
            except subprocess.TimeoutExpired:  # else it would hide the first error
                agent.kill()


def logs(folder: Path) -> str:
    """Returns what all hosts wrote."""
    return "\n".join(each.read_text() for each in sorted(folder.glob("log-*")))


def ended(agents: list[subprocess.Popen], folder: Path) -> list[int]:
    """Returns the exit codes of all hosts, which end in time."""
    try:
        return [agent.wait(PATIENCE) for agent in agents]
    except subprocess.TimeoutExpired as error:
        raise AssertionError(f"the job hangs:\n{logs(folder)[-4000:]}") from error


def wait_for_save(folder: Path) -> None:
    """Waits until a checkpoint is complete."""
    deadline = time.monotonic() + PATIENCE
    while not steps_saved(folder):
        assert time.monotonic() < deadline, f"nothing is saved:\n{logs(folder)[-4000:]}"
        time.sleep(0.01)


def cut_off(hosts: list[Host], kind: str, folder: Path) -> str:
    """Sets a host's link down in the middle of a training; the other host must end and say why."""
    with started(hosts, folder, kind) as agents:
        wait_for_save(folder)
        hosts[1].set_link("down")
        began = time.monotonic()
        try:
            codes = ended(agents[:1], folder)
        finally:
            hosts[1].set_link("up")
        took = time.monotonic() - began
    said = (folder / "log-0").read_text()
    assert codes != [0], f"it ends well without the other host:\n{said[-4000:]}"
    # It waits in an exchange of values, or in a collective of tensors.
    named = f"rank [23], which (did not come within {TIMEOUT} seconds|does not answer)"
    assert re.search(named, said), f"it does not say who did not come:\n{said[-4000:]}"
    return f"{kind}: a link went down; after {took:.0f} s the other host named the ranks, and ended"


def resumed(hosts: list[Host], kind: str, folder: Path, expected: dict[str, np.ndarray]) -> str:
    """Goes on from what was saved, and compares the weights with those of one device."""
    saved, steps = steps_saved(folder), folder / "steps-0"
    steps.unlink()
    with started(hosts, folder, kind) as agents:
        codes = ended(agents, folder)
    assert codes == [0] * len(hosts), f"exit codes {codes}:\n{logs(folder)[-4000:]}"
    first = int(steps.read_text().split()[0])
    assert first >= saved > 0, f"it resumes at step {first}, with {saved} saved"
    compare(folder, expected, 1e-5)
    return f"{kind}: resumed on {len(hosts)} hosts at step {first}: the weights of one device"


def main() -> None:
    """Prints a line for each thing that holds."""
    why = missing()
    if why:
        print(f"make hosts is skipped: {why}")
        return
    with made(HOSTS, RATE) as hosts, tempfile.TemporaryDirectory(prefix="shardcore-hosts-") as base:
        alone = Path(base) / "alone"
        alone.mkdir()
        run_ranks(training.train_undisturbed, 1, alone, EPOCHS, timeout=PATIENCE)
        for kind in KINDS:
            folder = Path(base) / kind
            folder.mkdir()
            print(cut_off(hosts, kind, folder), flush=True)
            print(resumed(hosts, kind, folder, weights(alone / "end.weights.h5")), flush=True)


if __name__ == "__main__":
    main()
