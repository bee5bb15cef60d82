"""The store of a job without torchrun: rank 0 holds it, and listens where the others look for it.

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

# torchrun sets it to "True" where its agent holds the store.
_AGENT_VARIABLE = "TORCHELASTIC_USE_AGENT_STORE"


def opened(job: Job, limit: timedelta) -> "Store | None":
    """Returns the store of rank 0, which listens on the address of the job alone.

    Returns:
        None on other ranks, under torchrun, and where torch has to listen on all addresses: for a
        name that stands for several, or for the loopback on this host alone, and for an address of
        another machine, such as a load balancer.
    """
    if job.rank != 0 or os.environ.get(_AGENT_VARIABLE) == "True":
        return None
    address = _address(job.master_address, job.master_port)
    if not address:
        return None
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        server = socket.create_server((address, job.master_port), family=family)
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


def _address(name: str, port: int) -> str:
    """Returns the one address by which all ranks reach this host; empty if there may be others."""
    with suppress(ValueError):
        return str(ipaddress.ip_address(name))
    with suppress(OSError):
        found = {each[4][0] for each in socket.getaddrinfo(name, port, type=socket.SOCK_STREAM)}
        if name == "localhost" and "127.0.0.1" in found:
            return "127.0.0.1"
        if len(found) == 1 and not ipaddress.ip_address(address := str(found.pop())).is_loopback:
            return address
    return ""
