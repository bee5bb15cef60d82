"""Descriptions of machines in files, and by the names of well-known ones."""

import json
import re
import tomllib
from pathlib import Path

import attrs

from shardcore.domain.errors import MachineError
from shardcore.domain.machines.known import known_machines, machine_with
from shardcore.domain.machines.machine import Machine, machine_of
from shardcore.reporting.logs import log_of

logger = log_of("plan")


def find(name_or_file: str) -> Machine:
    """Returns a well-known machine by its name, or the one that a JSON or TOML file describes.

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
            "'shardcore measure FILE' describes the machine at hand."
        ) from None
    except (OSError, ValueError) as error:
        raise MachineError(
            f"{name_or_file!r} is no file of a machine: {error}. "
            "'shardcore measure FILE' writes one."
        ) from error
    try:
        return machine_of(data)
    except MachineError as error:
        raise MachineError(f"{name_or_file!r}: {error}") from error


def here() -> Machine | None:
    """Returns the well-known machine whose CUDA devices this process sees; None for others.

    It has as many devices a host as this process sees, with their memory.
    """
    from shardcore.adapters.job import devices

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
            f"The description cannot be written to {str(file)!r}: {error}"
        ) from error


def bytes_of(size: int | str) -> int:
    """Returns a number of bytes: an integer, or text such as "80GB" or "74.5 GiB".

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
        raise MachineError(f"{size!r} is no size: give bytes, or text such as '80GB' or '74.5GiB'.")
    power = " KMGT".index(match[2].upper() or " ")
    unit: int = (1024 if match[3] else 1000) ** power
    return round(float(match[1]) * unit)
