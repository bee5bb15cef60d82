"""The cores of a host, which its ranks divide: together they have a thread for each core."""

import os
import socket
from pathlib import Path

import torch

from shardcore.adapters.ranks.job import devices, exchange, process_group
from shardcore.reporting.logs import log_of

logger = log_of("install")

_VARIABLE = "OMP_NUM_THREADS"


def divide() -> tuple[str, ...]:
    """Sets the threads of each rank to its share of the cores, unless the user has set a number.

    Returns the name of the host of each rank; nothing for a process without others.

    All ranks get the smallest share: with other numbers of threads they would round differently.
    All ranks call it together.
    """
    if not process_group.has_others():
        return ()
    host, cores = socket.gethostname(), available()
    most = _most_threads(cores, os.getppid()) if devices.device_type() == "cpu" else 0
    everyone = exchange.gather((host, cores, most))
    hosts = tuple(name for name, _, _ in everyone)
    share = min(min(most, max(1, total // hosts.count(name))) for name, total, most in everyone)
    if share:
        torch.set_num_threads(share)
        here = f"{cores} cores for {hosts.count(host)} ranks of this host"
        logger.debug("%d threads for each rank: %s; %s changes it", share, here, _VARIABLE)
    return hosts


def available() -> int:
    """Counts the cores that this process may use: its affinity may leave some out."""
    affinity = getattr(os, "sched_getaffinity", None)
    return os.cpu_count() or 1 if affinity is None else len(affinity(0))


def _most_threads(cores: int, parent: int) -> int:
    """Finds the most threads that this rank may get; 0 if the user has set their number.

    torchrun sets `OMP_NUM_THREADS=1` where it is unset. Linux shows the environment with which
    torchrun, the parent of this process, was started.
    """
    threads = torch.get_num_threads()
    if _VARIABLE not in os.environ:
        return threads  # of all cores, or what the user has given torch
    if "TORCHELASTIC_RUN_ID" not in os.environ or (os.environ[_VARIABLE], threads) != ("1", 1):
        return 0
    try:
        given = Path(f"/proc/{parent}/environ").read_bytes().split(b"\0")
    except OSError:
        return 0
    return 0 if any(setting.startswith(f"{_VARIABLE}=".encode()) for setting in given) else cores
