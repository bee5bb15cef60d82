"""The failure store: failures and ends of ranks, published in the store of the process group.

It is a few keys, which any number of ranks reads by a constant number of requests. Requests are
made on another thread where a rank cannot wait: a store that is stopped never answers.
"""

import json
import signal
import socket
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import Any, Generic, TypeVar
from weakref import WeakKeyDictionary

import torch.distributed as dist
from attrs import asdict, field, frozen, validators

from shardcore.adapters.ranks.job.signed_store import SignedStore
from shardcore.domain.errors import one_line

_T = TypeVar("_T")

# The exit code of a process that SIGTERM ends, as shells have it.
TERMINATED = 128 + signal.SIGTERM


@frozen
class Failure:
    """The failure of a rank, or its end by SIGTERM.

    Args:
        rank: The rank.
        headline: The error in one line.
        code: The exit code of ranks that end after it.
    """

    rank: int = field(validator=[validators.instance_of(int), validators.ge(0)])
    # The error may be of anyone: its lines could look like those of another rank.
    headline: str = field(converter=one_line)
    code: int = field(default=1, validator=validators.in_((1, TERMINATED)))


def terminated(rank: int) -> Failure:
    """Describes the end of all ranks after SIGTERM came to `rank`."""
    return Failure(rank, f"SIGTERM on rank {rank}", TERMINATED)


def silent(rank: int) -> Failure:
    """Describes a rank that ended and published nothing."""
    return Failure(rank, "its process ended without an error (killed, out of memory, os._exit?)")


def no_answer(seconds: float) -> Failure:
    """Describes a store that does not answer: its host may have stopped or died."""
    text = (
        f"{describe_host()} has not answered for {seconds:.0f} seconds: the host has "
        "ended, the process that holds the store is stopped, or the network stalls"
    )
    return Failure(0, text)


def lost() -> Failure:
    """Describes the store's host, whose connection has ended."""
    return Failure(0, f"the connection to {describe_host()} has ended")


@frozen
class FailureStore:
    """The store for one thread of one rank. Every method may raise if the store is closed."""

    # A connection for this thread alone; a wait on a shared one would block all others.
    signed: SignedStore
    rank: int

    def claim(self, failure: Failure) -> Failure:
        """Publishes the failure unless there is an earlier one; returns the first."""
        text = json.dumps(asdict(failure)).encode()
        return _failure(self.signed.claim("first", text))

    def first(self) -> Failure | None:
        """Reads the first failure of the job; None while there is none."""
        text = self.signed.find("first")
        return None if text is None else _failure(text)

    def request_end(self, rank: int) -> int:
        """Asks all ranks to end, since SIGTERM came to `rank`; returns the first such rank."""
        return int(self.signed.claim("sigterm", str(rank).encode()))

    def sigterm_rank(self) -> int | None:
        """Reads to which rank SIGTERM came first; None without any."""
        rank = self.signed.find("sigterm")
        return None if rank is None else int(rank)

    def publish_point(self, point: tuple[int, int] | None) -> None:
        """Publishes the last point that this rank has passed; None if it passes none."""
        self.signed.set(f"point/{self.rank}", json.dumps(point).encode())
        self.signed.store.add("points", 1)

    def points(self, world_size: int) -> "list[tuple[int, int] | None] | None":
        """Reads the points of all ranks; None until each has written its own."""
        if self.signed.store.add("points", 0) < world_size:
            return None
        points = self.signed.get([f"point/{rank}" for rank in range(world_size)])
        return [point and tuple(point) for point in map(json.loads, points)]

    def end(self) -> None:
        """Publishes that this rank has ended in order."""
        self.signed.set(f"ended/{self.rank}", b"")
        # `set` has no reply. A request with a reply ensures that the mark is stored.
        self.signed.store.add("release", 0)

    def has_ended(self, rank: int) -> bool:
        """Looks up whether the rank has published that it ended in order."""
        return self.signed.find(f"ended/{rank}") is not None

    def release(self) -> None:
        """Publishes that this rank no longer needs the store, or has read the failure; once."""
        self.signed.store.add("release", 1)

    def count_released(self) -> int:
        """Counts the ranks that no longer need the store, or have read the failure."""
        count: int = self.signed.store.add("release", 0)
        return count


def _failure(text: bytes) -> Failure:
    return Failure(**json.loads(text))


_RANKS: WeakKeyDictionary[Any, tuple[int, ...]] = WeakKeyDictionary()


def host_is_here() -> bool:
    """Tells whether this host has the address of the store."""
    host = getattr(_store(), "host", "")
    with suppress(OSError):  # the name of the host is not resolved here
        addresses = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM) if host else []
        return any(_is_bindable(family, str(address[0])) for family, _, _, _, address in addresses)
    return False


def remember_host_ranks(ranks: Sequence[int]) -> None:
    """Notes which ranks are on the host of the store."""
    _RANKS[dist.group.WORLD] = tuple(ranks)


def describe_host() -> str:
    """Describes where the store is, with the ranks that are there, if they are known."""
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


def _is_bindable(family: int, address: str) -> bool:
    with suppress(OSError), socket.socket(family, socket.SOCK_STREAM) as tried:
        tried.bind((address, 0))
        return True
    return False


def within(seconds: float, call: Callable[[], _T]) -> _T | None:
    """Calls `call` on another thread; None if it fails or takes longer: a store may be stopped.

    Example:
        >>> import time
        >>> within(1.0, lambda: 3), within(0.01, lambda: time.sleep(0.1))
        (3, None)
    """
    return Request.of(call).answer(seconds)


@frozen
class Request(Generic[_T]):
    """A call on another thread, which may never return."""

    _answer: "SimpleQueue[_T | None]"

    @classmethod
    def of(cls, call: Callable[[], _T]) -> "Request[_T]":
        """Starts the call."""
        answer: SimpleQueue[_T | None] = SimpleQueue()

        def run() -> None:
            try:
                answer.put(call())
            except (RuntimeError, OSError):  # torch's for a lost store; or no file is free
                answer.put(None)

        threading.Thread(target=run, name="shardcore-store", daemon=True).start()
        return cls(answer)

    def answer(self, seconds: float) -> _T | None:
        """Waits for the answer; None if the call fails, or has not returned after `seconds`."""
        try:
            return self._answer.get(timeout=seconds)
        except Empty:
            return None
