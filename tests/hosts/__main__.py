"""Trains on hosts of two ranks each that are network namespaces of this machine.

python -m tests.hosts
"""

import re
import tempfile
import time
from pathlib import Path

import numpy as np

from shardcore.testing import run_ranks
from tests.faults import training
from tests.faults.kills import KINDS, compare, steps_saved, weights
from tests.hosts.jobs import EPOCHS, PATIENCE, RANKS, TIMEOUT, Job, started
from tests.hosts.namespaces import Host, made, missing

RATE = "200mbit"
STALL = 3.0  # seconds
KIND = KINDS[1]  # of the checkpoints, where it makes no difference
Weights = dict[str, np.ndarray]


def cut_off(hosts: list[Host], kind: str, folder: Path) -> str:
    """Sets the last host's link down in a training; the first host names its ranks, and ends."""
    with started(hosts, folder, kind) as job:
        job.wait_for_save()
        hosts[-1].set_link("down")
        try:
            took = _ended_without(job, hosts[-1])
        finally:
            hosts[-1].set_link("up")
    return f"{kind}: a link went down; after {took:.0f} s the other host named the ranks, and ended"


def disappeared(hosts: list[Host], lost: Host, folder: Path) -> str:
    """Kills all of a host in a training; the other hosts name its ranks, and end."""
    with started(hosts, folder, KIND) as job:
        job.wait_for_save()
        job.lose(lost)
        took = _ended_without(job, lost)
    lost.set_link("up")
    return f"host {lost.number} of {len(hosts)} disappeared; after {took:.0f} s the others ended"


def resumed(hosts: list[Host], kind: str, folder: Path, expected: Weights) -> str:
    """Goes on from what was saved, and compares the weights with those of one device."""
    saved = steps_saved(folder)
    with started(hosts, folder, kind) as job:
        first = _trained(job, expected)[0]
    assert first >= saved > 0, f"it resumes at step {first}, with {saved} saved"
    return f"{kind}: resumed on {len(hosts)} hosts at step {first}: the weights of one device"


def stalled(hosts: list[Host], folder: Path, expected: Weights) -> str:
    """Sets a link down for less than the timeout; the training goes on."""
    with started(hosts, folder, KIND) as job:
        job.wait_for_save()
        hosts[-1].set_link("down")
        time.sleep(STALL / 2)
        before = job.steps()
        time.sleep(STALL / 2)
        stood = job.steps()
        hosts[-1].set_link("up")
        assert before == stood, f"it trains without a link: {len(before)}, {len(stood)} steps"
        steps = _trained(job, expected)
    assert len(stood) < len(steps) == EPOCHS * training.STEPS
    return f"a link stalled for {STALL:.0f} s at step {stood[-1]}: the weights of one device"


def wrong_interface(hosts: list[Host], folder: Path) -> str:
    """Names an interface that the last host has not; all hosts say so, and end."""
    with started(hosts, folder, KIND, {hosts[-1].number: "nonexistent"}) as job:
        codes = job.codes()
        assert 0 not in codes, f"exit codes {codes}:\n{job.last_lines()}"
        wrong = f"host '{hosts[-1].name}' that has an address, got 'nonexistent'"
        why = rf"Expected GLOO_SOCKET_IFNAME to name .*{wrong} .*That host has lo, net0\."
        for host in hosts:
            said = job.said(host.number)
            assert re.search(why, said), f"{host.name} does not say why:\n{said[-4000:]}"
    return "GLOO_SOCKET_IFNAME names no interface of a host: all hosts say which, and end"


def loopback(hosts: list[Host], folder: Path) -> str:
    """Names an interface that does not reach the other hosts; the first host to end says so."""
    with started(hosts, folder, KIND, {each.number: "lo" for each in hosts}) as job:
        said = job.said(job.first_to_end())
        why = r"could not connect .*GLOO_SOCKET_IFNAME=lo .*That host has lo, net0\."
        assert re.search(why, said), f"it does not say why:\n{said[-4000:]}"
    return (
        "GLOO_SOCKET_IFNAME=lo on all hosts: one says that it does not reach the others, and ends"
    )


def _ended_without(job: Job, lost: Host) -> float:
    """Returns the seconds until the ranks of the other hosts have ended, and named the lost."""
    began = time.monotonic()
    others = [each for each in job.hosts if each != lost]
    job.wait_for_end_of_ranks(others)
    took = time.monotonic() - began
    assert not job.has_ended_well(), f"it ends well without a host:\n{job.last_lines()}"
    ranks = "|".join(str(RANKS * lost.number + each) for each in range(RANKS))
    # It waits in an exchange of values, or in a collective of tensors.
    named = rf"rank ({ranks}), which (did not come within {TIMEOUT} seconds|does not answer)"
    if lost.number == 0:
        numbers = ", ".join(str(each) for each in range(RANKS))
        named = (
            rf"the store at \S+, on the host of ranks {numbers}, (has not|which does not) answer"
        )
    for host in others:
        said = job.said(host.number)
        assert re.search(named, said), f"{host.name} does not name them:\n{said[-4000:]}"
    return took


def _trained(job: Job, expected: Weights) -> list[int]:
    """Waits for the end; compares the weights with those expected, and returns the steps."""
    codes = job.codes()
    assert codes == [0] * len(job.hosts), f"exit codes {codes}:\n{job.last_lines()}"
    compare(job.folder, expected, 1e-5)
    return job.steps()


def main() -> None:
    """Prints a line for each thing that holds."""
    why = missing()
    if why:
        print(f"make hosts is skipped: {why}")
        return
    with tempfile.TemporaryDirectory(prefix="shardcore-hosts-") as base:

        def folder(name: str) -> Path:
            (Path(base) / name).mkdir()
            return Path(base) / name

        alone = folder("alone")
        run_ranks(training.train_undisturbed, 1, alone, EPOCHS, timeout=PATIENCE)
        expected = weights(alone / "end.weights.h5")
        with made(2, RATE) as hosts:
            print(wrong_interface(hosts, folder("wrong")), flush=True)
            print(loopback(hosts, folder("loopback")), flush=True)
            print(stalled(hosts, folder("stalled"), expected), flush=True)
            for kind in KINDS:
                print(cut_off(hosts, kind, folder(kind)), flush=True)
                print(resumed(hosts, kind, Path(base) / kind, expected), flush=True)
        for count, lost in ((3, 0), (4, 3)):
            own = folder(f"disappeared-{count}")
            with made(count, RATE) as hosts:
                print(disappeared(hosts, hosts[lost], own), flush=True)
                print(resumed(hosts, KIND, own, expected), flush=True)


if __name__ == "__main__":
    main()
