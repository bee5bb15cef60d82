"""A store whose values only ranks of this job can write (ADR 42).

Who reaches the port of torch's store can write into it. Each value is therefore signed (HMAC) with
a secret that rank 0 draws and sends to the others over the process group. A value is checked before
anything reads it, and only then decoded. A large value is stored in pieces, each with a signature.
"""

import hashlib
import hmac
import json
import os
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from attrs import frozen

from shardcore.domain.errors import CallProblem, EnvironmentProblem
from shardcore.reporting.errors import say

if TYPE_CHECKING:  # a torch without torch.distributed has no stores
    from torch.distributed.distributed_c10d import Store


def absent(store: "Store", keys: Sequence[str]) -> Iterator[int]:
    """Yields the positions of the keys that have no value, by requests for halves of the keys.

    Example:
        >>> from torch.distributed import HashStore
        >>> store = HashStore()
        >>> store.set("a", "")
        >>> list(absent(store, ["a", "b", "c"]))
        [1, 2]
    """
    yield from _absent(store, keys, range(len(keys)))


def values(store: Any, keys: Sequence[str]) -> list[bytes]:
    """Reads the values of `keys`, which exist: in one request, where the store can do that."""
    extended = store.has_extended_api()  # the stubs of torch lack it
    return store.multi_get(keys) if extended else [store.get(key) for key in keys]


def _absent(store: "Store", keys: Sequence[str], part: range) -> Iterator[int]:
    if store.check([keys[number] for number in part]):
        return
    if len(part) == 1:
        yield from part
        return
    half = len(part) // 2
    yield from _absent(store, keys, part[:half])
    yield from _absent(store, keys, part[half:])


_SIZE = 32  # bytes of the secret, and of a signature
_TRIES = 5
# The most bytes of a value in one piece. torch's store closes a connection that sends it more than
# 8 MiB at once (2.10 to 2.12: MAX_PAYLOAD_LEN in TCPStoreLibUvBackend.cpp).
PIECE = 4 * 2**20

_SECRETS: "WeakKeyDictionary[Any, bytes]" = WeakKeyDictionary()


def has_secret() -> bool:
    """Tells whether the ranks of the process group share a secret."""
    return dist.group.WORLD in _SECRETS


def share_secret() -> None:
    """Broadcasts a secret that rank 0 draws. A collective."""
    device = "cuda" if dist.get_backend() == "nccl" else "cpu"
    drawn = torch.tensor(list(os.urandom(_SIZE)), dtype=torch.uint8, device=device)
    dist.broadcast(drawn, src=0)
    _SECRETS[dist.group.WORLD] = bytes(drawn.tolist())


def secret() -> bytes:
    """Looks up the secret of the process group.

    Raises:
        CallProblem: If they share none.
    """
    shared = _SECRETS.get(dist.group.WORLD)
    if shared is None:
        raise CallProblem(
            "Expected the ranks to share a secret before they exchange values: call "
            "keras.distribution.initialize(), or set a distribution, on all ranks first."
        )
    return shared


@frozen
class SignedStore:
    """Signed values in a store. What needs no signature is called on `store` itself.

    Args:
        store: The store, on a connection of one thread.
        secret: The secret of the ranks.

    Example:
        >>> from torch.distributed import HashStore
        >>> shared = SignedStore(HashStore(), b"drawn by rank 0")
        >>> shared.set("place/1", b"has ended")
        >>> shared.get(["place/1"])
        [b'has ended']
    """

    store: Any  # a Store: the stubs of torch do not know that it takes bytes
    secret: bytes

    def set(self, key: str, value: bytes) -> None:
        """Writes a value, of any size."""
        if len(value) > PIECE:
            self._write_pieces(key, value)
        else:
            self.store.set(key, self._signed(key, value))

    def get(self, keys: list[str]) -> list[bytes]:
        """Reads the values of `keys`, which exist: in one request, where the store can do that.

        Raises:
            EnvironmentProblem: If no rank of this job has written one of them.
        """
        all_signed = values(self.store, keys)
        return [self._require(key, signed) for key, signed in zip(keys, all_signed, strict=True)]

    def find_all(self, keys: list[str]) -> list[bytes | None]:
        """Finds each key as `find` does: by two requests, if all keys have a value."""
        if not self.store.check(keys) or not self.store.has_extended_api():
            return [self.find(key) for key in keys]
        pairs = zip(keys, self.store.multi_get(keys), strict=True)
        opened = {key: self._open(key, signed) for key, signed in pairs}
        return [self.find(key) if value is None else value for key, value in opened.items()]

    def find(self, key: str) -> bytes | None:
        """Reads the value of `key`; None if there is none, or only one of another program.

        That one is removed, and a line says so.
        """
        if not self.store.check([key]):
            return None
        signed = self.store.get(key)
        value = self._open(key, signed)
        if value is None and signed:
            self.store.compare_set(key, signed, b"")
            say(f"{self._problem(key)} It is ignored.\n")
        return value

    def claim(self, key: str, value: bytes) -> bytes:
        """Writes a small value unless a rank has written one before; returns the first."""
        signed, expected = self._signed(key, value), b""
        for _ in range(_TRIES):
            stored = self.store.compare_set(key, expected, signed)
            first = self._verify(key, stored)
            if first is not None:
                return first
            expected = stored  # of another program: it is replaced
        raise EnvironmentProblem(self._problem(key))

    def delete(self, key: str) -> None:
        """Removes a value with its pieces, if there is one."""
        if self.store.check([key]):
            for piece in self._pieces_of(key, self.store.get(key)):
                self.store.delete_key(piece)
            self.store.delete_key(key)

    def _write_pieces(self, key: str, value: bytes) -> None:
        """Writes the pieces of a large value, and at `key` how many there are.

        Their keys have its digest: a piece of an earlier value with the same key is none of it.
        """
        count = -(-len(value) // PIECE)
        header = json.dumps([hashlib.sha256(value).hexdigest(), count]).encode()
        signed = self._signed(_header_name(key), header)
        for number, piece in enumerate(self._pieces_of(key, signed)):
            self.set(piece, value[number * PIECE : (number + 1) * PIECE])
        self.store.set(key, signed)

    def _pieces_of(self, key: str, signed: bytes) -> list[str]:
        """Lists the keys of the pieces of a large value; none of a small one."""
        header = self._verify(_header_name(key), signed)
        if header is None:
            return []
        digest, count = json.loads(header)
        return [f"{key}/{digest}/{number}" for number in range(count)]

    def _open(self, key: str, signed: bytes) -> bytes | None:
        """Joins and verifies the value at `key`; None if no rank of this job wrote it."""
        value = self._verify(key, signed)
        if value is not None:
            return value
        pieces = self._pieces_of(key, signed)
        if not pieces or not self.store.check(pieces):
            return None
        values = [self._verify(piece, self.store.get(piece)) for piece in pieces]
        parts = [part for part in values if part is not None]
        return b"".join(parts) if len(parts) == len(pieces) else None

    def _signed(self, key: str, value: bytes) -> bytes:
        return hmac.digest(self.secret, repr(key).encode() + value, "sha256") + value

    def _verify(self, key: str, signed: bytes) -> bytes | None:
        value = signed[_SIZE:]
        return value if hmac.compare_digest(signed, self._signed(key, value)) else None

    def _require(self, key: str, signed: bytes) -> bytes:
        value = self._open(key, signed)
        if value is None:
            raise EnvironmentProblem(self._problem(key))
        return value

    def _problem(self, key: str) -> str:
        return (
            f"Expected the value {key!r} in the store of the process group to be of a rank of this "
            "job, but another program has written it. Let a firewall close the port of the store "
            "(MASTER_PORT, or that of torchrun's rendezvous) to other hosts and users."
        )


def _header_name(key: str) -> str:
    """Names the header of a large value for its signature: it is no small value."""
    return f"{key} in pieces"
