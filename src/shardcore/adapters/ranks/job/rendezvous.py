"""The start of a job: network interface, store, a name for the start, and ranks that cannot start.

Without torchrun rank 0 holds the store, and listens on the address of the job. torch listens on all
addresses of the host. Under torchrun its agent holds the store, and does so.

gloo listens on the interface that `GLOO_SOCKET_IFNAME` names, or on that of the host's name. torch
2.13 says "Unable to find address for: eth7" on the rank with a wrong name. The other ranks wait for
its address until the timeout: ranks that connect wait in C++ for one that has failed. So a rank
tells the others its problem before they connect.

torchrun's store outlives its ranks, with their keys, so each start has a name (ADR 36). torch 2.13
keeps one store through all restarts, and gloo would read the addresses of ended ranks. The count of
restarts is no name: the agents of two hosts can differ in it.
"""

import ipaddress
import os
import re
import socket
import time
from contextlib import suppress
from datetime import timedelta
from typing import TYPE_CHECKING, Any
from uuid import uuid4

import torch.distributed as dist

from shardcore.adapters.ranks.job.signed_store import absent, values
from shardcore.domain.ranks.job import Job

if TYPE_CHECKING:  # a torch without torch.distributed has no stores
    from torch.distributed.distributed_c10d import Store

_BACKLOG = 2048  # ranks that connect at once
# torchrun sets it to "True" where its agent holds the store.
_AGENT_VARIABLE = "TORCHELASTIC_USE_AGENT_STORE"


def open_store(job: Job, limit: timedelta) -> "Store | None":
    """Opens the store of rank 0, which listens on the address of the job alone.

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
    """Reads an address that is a number, or this host's own; empty for a name."""
    if given == "localhost":
        return "127.0.0.1"
    with suppress(ValueError):
        return str(ipaddress.ip_address(given))
    return ""


_INTERFACE = "GLOO_SOCKET_IFNAME"


def interface_problem(rank: int) -> str:
    """Explains why gloo cannot listen on the interfaces that this rank names; empty if it can.

    Example:
        >>> interface_problem(0)  # the variable is not set
        ''
    """
    wrong = [name for name in _interfaces() if not _has_address(name)]
    if not wrong:
        return ""
    return (
        f"Expected {_INTERFACE} to name a network interface of host {socket.gethostname()!r} that "
        f"has an address, got {wrong[0]!r} on rank {rank}. That host has {_usable()}. Set the "
        "variable there to the one that reaches the other hosts, or unset it: gloo then listens "
        "on the address of the host's name."
    )


def unreachable(error: RuntimeError, rank: int) -> str:
    """Explains what to do about gloo's `error`: this rank did not reach another one."""
    named = ",".join(_interfaces())
    source = f"the interface of {_INTERFACE}={named}" if named else "the address of the host's name"
    return (
        f"Rank {rank} could not connect to the other ranks by gloo, which listens on {source} at "
        f"host {socket.gethostname()!r}: {error}. That host has {_usable()}. Set {_INTERFACE} on "
        "each host to the interface that reaches the others, not the loopback, and let the "
        "firewall pass connections between them."
    )


def _interfaces() -> list[str]:
    """Lists the interfaces that torch takes from the variable; it ignores a single character."""
    text = os.environ.get(_INTERFACE, "")
    return [name for name in text.split(",") if name] if len(text) > 1 else []


def _usable() -> str:
    return ", ".join(name for _, name in socket.if_nameindex() if _has_address(name))


def _has_address(name: str) -> bool:
    try:
        dist.ProcessGroupGloo.create_device(interface=name)  # as torch does it
    except RuntimeError:
        return False
    return True


# The seconds between two looks for names: the later, the longer.
_SLEEP_SECONDS = 0.01
_MOST_SLEEP_SECONDS = 0.5


def agree_on_name(store: "Store", job: Job, limit: timedelta) -> str:
    """Agrees on a name that all ranks of this start have, and no earlier start had.

    Each rank asks under a new name, which no ended rank used. Rank 0 answers all that ask,
    also those of an earlier start, until each rank of this one has its answer. Each of its
    looks is one request for all ranks; the other ranks send a fixed number of requests.

    Raises:
        DistError: If the ranks do not all come within `limit`.
    """
    own = uuid4().hex
    if job.rank == 0:
        _answer(store, own, range(1, job.world_size), limit)
        return own
    store.set(f"asks/{job.rank}", own)
    store.wait([f"answer/{own}"], limit)
    name = _name(store.get(f"answer/{own}"))
    store.set(f"{name}/{job.rank}", "")
    return name


def _answer(store: "Store", name: str, others: range, limit: timedelta) -> None:
    begun = time.monotonic()
    asks = [f"asks/{rank}" for rank in others]
    have_answer = [f"{name}/{rank}" for rank in others]
    answered: set[str] = set()
    while not store.check(have_answer):
        waited = time.monotonic() - begun
        if waited > limit.total_seconds():
            late = list(absent(store, asks)) or list(absent(store, have_answer))
            raise dist.DistStoreError(f"ranks {[others[number] for number in late]} did not come")
        if store.check(asks):
            new = set(map(_name, values(store, asks))) - answered
            _write(store, [f"answer/{start}" for start in new], name)
            answered |= new
        time.sleep(min(_MOST_SLEEP_SECONDS, max(_SLEEP_SECONDS, waited / 10)))


def _write(store: Any, keys: list[str], value: str) -> None:
    """Writes one value under all keys, in one request where the store can do that."""
    if keys and store.has_extended_api():
        store.multi_set(keys, [value] * len(keys))
        return
    for key in keys:
        store.set(key, value)


def _name(written: bytes) -> str:
    if not re.fullmatch(rb"[0-9a-f]{32}", written):
        raise dist.DistStoreError("a name in the store is not of a rank: who else writes there?")
    return written.decode()


# The most time that ranks with a problem give the others to come and read it: the end of a rank
# may end the store.
TELL_LIMIT = timedelta(seconds=30)


def share_problem(problem: str, store: "Store", job: Job, limit: timedelta) -> str:
    """Shares the problem of a rank that has one; empty once all ranks are here without.

    Args:
        problem: That of this rank, or nothing.
        store: The store of this start of the job.
        job: The rank and its job.
        limit: The most time to wait for the others.

    Raises:
        DistError: If not all ranks come, and none has a problem.
    """
    if problem or store.add("ready", 1) == job.world_size:
        store.set("start", problem)
    store.wait(["start"], limit)
    text = store.get("start").decode(errors="replace")
    if text:
        with suppress(RuntimeError):  # the store has ended with another rank
            _wait_for_others(store, job)
    # It is not signed: there is no secret yet.
    return "".join(character for character in text if character.isprintable())


def _wait_for_others(store: "Store", job: Job) -> None:
    deadline = time.monotonic() + TELL_LIMIT.total_seconds()
    store.add("read", 1)
    while store.add("read", 0) < job.world_size and time.monotonic() < deadline:
        time.sleep(_SLEEP_SECONDS)
