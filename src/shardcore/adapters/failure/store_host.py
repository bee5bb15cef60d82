"""The host of the store: ranks that are there end with it, and no rank can ask for them then."""

import socket
from collections.abc import Sequence
from contextlib import suppress
from typing import Any
from weakref import WeakKeyDictionary

import torch.distributed as dist

_RANKS: WeakKeyDictionary[Any, tuple[int, ...]] = WeakKeyDictionary()


def is_here() -> bool:
    """Returns whether this host has the address of the store."""
    host = getattr(_store(), "host", "")
    with suppress(OSError):  # the name of the host is not resolved here
        return any(_has(family, address[0]) for family, _, _, _, address in _addresses(host))
    return False


def remember(ranks: Sequence[int]) -> None:
    """Notes which ranks are on the host of the store."""
    _RANKS[dist.group.WORLD] = tuple(ranks)


def describe() -> str:
    """Returns where the store is, with the ranks that are there, if they are known."""
    store = _store()
    at = f" at {store.host}:{store.port}" if hasattr(store, "host") else ""
    ranks = _RANKS.get(dist.group.WORLD, ())
    numbers = ", ".join(map(str, ranks))
    where = f", on the host of rank{'s' * (len(ranks) > 1)} {numbers}," if ranks else ""
    return f"the store{at}{where}"


def _store() -> Any:
    group: Any = dist.group.WORLD  # the stubs of torch lack the store
    store = group.get_group_store()
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    return store


def _addresses(host: str) -> Sequence[Any]:
    return socket.getaddrinfo(host, None, type=socket.SOCK_STREAM) if host else []


def _has(family: int, address: str) -> bool:
    """Returns whether this host has the address: only then can a socket be bound to it."""
    with suppress(OSError), socket.socket(family, socket.SOCK_STREAM) as tried:
        tried.bind((address, 0))
        return True
    return False
