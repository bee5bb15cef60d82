"""The network interface that gloo listens on: `GLOO_SOCKET_IFNAME`, or that of the host's name.

torch 2.13 says "Unable to find address for: eth7" on the rank with a wrong name. The other ranks
wait for its address until the timeout.
"""

import os
import socket

import torch.distributed as dist

VARIABLE = "GLOO_SOCKET_IFNAME"


def problem(rank: int) -> str:
    """Returns why gloo cannot listen on the interfaces that this rank names; empty if it can.

    Example:
        >>> problem(0)  # the variable is not set
        ''
    """
    wrong = [name for name in _interfaces() if not _has_address(name)]
    if not wrong:
        return ""
    return (
        f"Expected {VARIABLE} to name a network interface of host {socket.gethostname()!r} that "
        f"has an address, got {wrong[0]!r} on rank {rank}. That host has {_usable()}. Set the "
        "variable there to the one that reaches the other hosts, or unset it: gloo then listens "
        "on the address of the host's name."
    )


def unreachable(error: RuntimeError, rank: int) -> str:
    """Returns what to do about gloo's `error`: this rank did not reach another one."""
    named = ",".join(_interfaces())
    source = f"the interface of {VARIABLE}={named}" if named else "the address of the host's name"
    return (
        f"Rank {rank} could not connect to the other ranks by gloo, which listens on {source} at "
        f"host {socket.gethostname()!r}: {error}. That host has {_usable()}. Set {VARIABLE} on "
        "each host to the interface that reaches the others, not the loopback, and let the "
        "firewall pass connections between them."
    )


def _interfaces() -> list[str]:
    """Returns the interfaces that torch takes from the variable; it ignores a single character."""
    text = os.environ.get(VARIABLE, "")
    return [name for name in text.split(",") if name] if len(text) > 1 else []


def _usable() -> str:
    return ", ".join(name for _, name in socket.if_nameindex() if _has_address(name))


def _has_address(name: str) -> bool:
    try:
        dist.ProcessGroupGloo.create_device(interface=name)  # as torch does it
    except RuntimeError:
        return False
    return True
