"""The store of a job without torchrun: rank 0 holds it, and listens on the address of the job.

torch listens on all addresses of the host. Under torchrun its agent holds the store, and does so.
"""

import ipaddress
import os
import socket
from contextlib import suppress
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from shardcore.domain.job import Job

if TYPE_CHECKING:  # a torch without torch.distributed has no stores
    from torch.distributed.distributed_c10d import Store

_BACKLOG = 2048  # ranks that connect at once
# torchrun sets it to "True" where its agent holds the store.
_AGENT_VARIABLE = "TORCHELASTIC_USE_AGENT_STORE"


def open_store(job: Job, limit: timedelta) -> "Store | None":
    """Returns the store of rank 0, which listens on the address of the job alone.

    Returns:
        None on other ranks, under torchrun, and where torch has to listen on all addresses: for a
        name, which other hosts may take for another address, and for an address that is not of
        this host, such as that of a load balancer.
    """
    if job.rank != 0 or os.environ.get(_AGENT_VARIABLE) == "True":
        return None
    address = _address(job.master_address)
    if not address:
        return None
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        server = socket.create_server((address, job.master_port), family=family, backlog=_BACKLOG)
    except OSError:  # it is not of this host; or the port is taken, which torch says better
        return None
    distributed: Any = dist  # the stubs of torch lack the class
    store: Store = distributed.TCPStore(
        job.master_address,
        job.master_port,
        job.world_size,
        is_master=True,
        timeout=limit,
        master_listen_fd=server.detach(),
    )
    return store


def _address(given: str) -> str:
    """Returns the address that is given as a number, or is this host's own; empty for a name."""
    if given == "localhost":
        return "127.0.0.1"
    with suppress(ValueError):
        return str(ipaddress.ip_address(given))
    return ""
