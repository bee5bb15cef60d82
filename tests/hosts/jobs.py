"""Runs a training under torchrun on hosts, which meet at the first one."""

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import attrs

from tests.faults import training
from tests.faults.kills import steps_saved
from tests.hosts.namespaces import Host

RANKS = 2  # of each host
EPOCHS = 20
TIMEOUT = 15  # seconds that a rank waits for the others
PATIENCE = 240.0
AGENT = ("unshare", "torchrun")  # the processes of a host that are no ranks


@attrs.frozen
class Job:
    """A training on hosts.

    Args:
        hosts: They have two ranks each, in this order.
        folder: Where it writes; all hosts see it.
        agents: torchrun on each host.
    """

    hosts: list[Host]
    folder: Path
    agents: list[subprocess.Popen]

    def said(self, number: int) -> str:
        """Returns what the host of this number wrote."""
        return (self.folder / f"log-{number}").read_text()

    def lose(self, host: Host) -> None:
        """Makes a host disappear: its link goes down, then all its processes are killed."""
        host.set_link("down")
        self.agents[host.number].kill()

    def codes(self) -> list[int]:
        """Returns the exit codes of all hosts, once they have ended."""
        self._wait(lambda: all(each.poll() is not None for each in self.agents), "the job hangs")
        return [each.returncode for each in self.agents]

    def first_to_end(self) -> int:
        """Returns the number of a host that has ended, once there is one."""
        self._wait(lambda: any(each.poll() is not None for each in self.agents), "the job hangs")
        return next(number for number, each in enumerate(self.agents) if each.poll() is not None)

    def wait_for_end_of_ranks(self, hosts: list[Host]) -> None:
        """Waits until no rank lives on these hosts; torchrun may live."""
        self._wait(lambda: all(len(each.processes()) <= len(AGENT) for each in hosts), "it hangs")

    def wait_for_save(self) -> None:
        """Waits until a checkpoint is complete."""
        self._wait(lambda: steps_saved(self.folder) > 0, "nothing is saved")

    def steps(self) -> list[int]:
        """Returns the steps that this start has begun."""
        return [int(each) for each in (self.folder / "steps-0").read_text().split()]

    def has_ended_well(self) -> bool:
        """Returns whether the weights at the end are written."""
        return (self.folder / "end.weights.h5").exists()

    def last_lines(self) -> str:
        """Returns the last lines of each host."""
        return "\n".join(self.said(number)[-3000:] for number in range(len(self.hosts)))

    def _wait(self, is_so: Callable[[], bool], problem: str) -> None:
        deadline = time.monotonic() + PATIENCE
        while not is_so():
            assert time.monotonic() < deadline, f"{problem}:\n{self.last_lines()}"
            time.sleep(0.01)


@contextmanager
def started(
    hosts: list[Host], folder: Path, kind: str, interfaces: dict[int, str] | None = None
) -> Iterator[Job]:
    """Runs the training, and ends it at the end of the context.

    Args:
        hosts: Where.
        folder: Where it writes.
        kind: The kind of its checkpoints.
        interfaces: The values of GLOO_SOCKET_IFNAME, by the numbers of hosts.
    """
    (folder / "steps-0").unlink(missing_ok=True)  # of an earlier start
    meeting = ["--rdzv-backend=c10d", f"--rdzv-endpoint={hosts[0].name}:29400", "--rdzv-id=hosts"]
    ranks = [f"--nnodes={len(hosts)}", f"--nproc_per_node={RANKS}"]
    script = [training.__file__, str(folder), kind, str(EPOCHS)]
    command = [sys.executable, "-m", "torch.distributed.run", *ranks, *meeting, *script]
    own = {"OMP_NUM_THREADS": "1", "KERAS_BACKEND": "torch", "SHARDCORE_TIMEOUT": str(TIMEOUT)}
    agents = []
    try:
        for host in hosts:
            name = (interfaces or {}).get(host.number)
            env = os.environ | own | ({"GLOO_SOCKET_IFNAME": name} if name else {})
            with (folder / f"log-{host.number}").open("w") as log:
                agents.append(
                    subprocess.Popen(host.command(*command), stdout=log, stderr=log, env=env)
                )
        yield Job(hosts, folder, agents)
    finally:
        for agent in agents:
            agent.kill()  # and with it the ranks
            agent.wait()
        while any(each.processes() for each in hosts):  # which the kernel kills
            time.sleep(0.01)
