"""Descriptions of machines: in files, by the names of well-known ones, and measured."""

import json
import re
import socket
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path

import attrs

from shardcore import bootstrap
from shardcore.domain.cost.collective_cost import BETWEEN_HOSTS, WITHIN_A_HOST, slowest
from shardcore.domain.cost.machine import Machine, Speed, known_machines, machine_of, machine_with
from shardcore.domain.errors import MachineError
from shardcore.reporting.logs import log_of

logger = log_of("plan")


def find(name_or_file: str) -> Machine:
    """Looks up a well-known machine by its name, or reads the one in a JSON or TOML file.

    Raises:
        MachineError: If there is no such machine or file, or the file describes none.

    Example:
        >>> find("h100").devices
        8
    """
    known = known_machines()
    if name_or_file in known:
        return known[name_or_file]
    path = Path(name_or_file)
    try:
        text = path.read_text(encoding="utf-8")
        data = tomllib.loads(text) if path.suffix == ".toml" else json.loads(text)
    except FileNotFoundError:
        raise MachineError(
            f"No machine {name_or_file!r}: there are {', '.join(known)}, and no such file. "
            "'shardcore measure FILE' describes the machine at hand.",
            name=name_or_file,
        ) from None
    except (OSError, ValueError) as error:
        raise MachineError(
            f"{name_or_file!r} is no file of a machine: {error}. "
            "'shardcore measure FILE' writes one.",
            name=name_or_file,
        ) from error
    try:
        return machine_of(data)
    except MachineError as error:
        raise MachineError(f"{name_or_file!r}: {error}", name=name_or_file) from error


def here() -> Machine | None:
    """Recognizes the well-known machine whose CUDA devices this process sees; None for others.

    It has as many devices a host as this process sees, with their memory.
    """
    from shardcore.adapters.ranks.job import devices

    seen = devices.cuda_devices()
    names = list(dict.fromkeys(seen.names))
    machine = machine_with(names[0]) if len(names) == 1 else None
    if machine is not None:
        return attrs.evolve(machine, devices=len(seen.names), memory=min(seen.memory))
    if names:
        logger.warning(
            "%s: no well-known machine has such devices, so the prediction is not for this one; "
            "'shardcore measure FILE' describes it, for machine=FILE",
            ", ".join(names),
        )
    return None


def write(machine: Machine, file: Path) -> None:
    """Writes the description of a machine as JSON, which `find` reads.

    Raises:
        MachineError: If the file cannot be written.
    """
    try:
        file.write_text(json.dumps(machine.to_dict(), indent=2) + "\n", encoding="utf-8")
    except OSError as error:
        raise MachineError(
            f"The description cannot be written to {str(file)!r}: {error}", name=str(file)
        ) from error


def bytes_of(size: int | str) -> int:
    """Parses a number of bytes: an integer, or text such as "80GB" or "74.5 GiB".

    Raises:
        MachineError: If it is neither.

    Example:
        >>> bytes_of("80GB"), bytes_of("2 GiB"), bytes_of(512)
        (80000000000, 2147483648, 512)
    """
    if isinstance(size, int) and not isinstance(size, bool) and size > 0:
        return size
    match = re.fullmatch(r"(\d+(?:\.\d+)?) ?([kKMGT]?)(i?)B", str(size))
    if match is None or not float(match[1]):
        raise MachineError(
            f"{size!r} is no size: give bytes, or text such as '80GB' or '74.5GiB'.", got=repr(size)
        )
    power = " KMGT".index(match[2].upper() or " ")
    unit: int = (1024 if match[3] else 1000) ** power
    return round(float(match[1]) * unit)


def measure(name: str) -> Machine:
    """Measures this machine; if ranks differ, the slowest one counts.

    A link that no two ranks use is a default of `collective_cost`. A collective: all ranks call it.

    Args:
        name: The name of the machine.

    Raises:
        EnvironmentProblem: If shardcore is not installed.
        MachineError: If the hosts have different numbers of ranks.
    """
    from shardcore.adapters.cost import rates

    processes = bootstrap.installation().processes
    processes.initialize()
    hosts: dict[str, list[int]] = {}
    for rank, host in enumerate(processes.gather(socket.gethostname())):
        hosts.setdefault(host, []).append(rank)
    sizes = {host: len(ranks) for host, ranks in hosts.items()}
    if len(set(sizes.values())) > 1:
        raise MachineError(
            f"Expected as many ranks on each host, got {sizes} (ranks by host): start torchrun "
            "with one --nproc_per_node on all hosts.",
            got=str(sizes),
        )
    here = len(hosts[socket.gethostname()])
    near = list(hosts.values())
    far = [list(ranks) for ranks in zip(*near, strict=True)]
    within = rates.link(near) if here > 1 else WITHIN_A_HOST
    between = rates.link(far) if len(near) > 1 else BETWEEN_HOSTS
    hidden = rates.hidden() if processes.world_size > 1 else 1.0
    measured = processes.gather((rates.speeds(), rates.memory(here), within, between, hidden))
    speeds, memory, within_all, between_all, hidden_all = zip(*measured, strict=True)
    links = slowest(within_all), slowest(between_all)
    return Machine(name, here, min(memory), _slowest(speeds), *links, min(hidden_all))


def _slowest(speeds: Sequence[Mapping[str, Speed]]) -> dict[str, Speed]:
    return {
        dtype: Speed(
            min(rank_speeds[dtype].flops for rank_speeds in speeds),
            min(rank_speeds[dtype].bandwidth for rank_speeds in speeds),
        )
        for dtype in speeds[0]
    }
