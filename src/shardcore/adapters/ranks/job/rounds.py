"""Rounds of the exchange: each rank publishes a value, one joins them, all read the result.

Requests of a rank do not depend on the number of ranks, but for those of the rank that joins the
values. The result of equal values has the size of one.

A value is sent with the call and the line of its rank. One that cannot be pickled is replaced by an
error that all ranks raise: none waits in vain.
"""

import pickle
from collections.abc import Iterator
from itertools import groupby
from typing import Any

from attrs import evolve, frozen

from shardcore.adapters.ranks.job.signed_store import SignedStore, absent
from shardcore.domain.errors import ArgumentProblem, ShardcoreError, describe_error, mark_shared

_REMEDY = "give numbers, texts, arrays, or lists and dicts of them"


@frozen
class Round:
    """One round.

    Args:
        number: Its number, which all ranks count alike.
        rank: This rank.
        ranks: How many ranks there are.
        shared: The store.

    Example:
        >>> from torch.distributed import HashStore
        >>> shared = SignedStore(HashStore(), b"drawn by rank 0")
        >>> first, second = (Round.following(rank, 2, shared) for rank in range(2))
        >>> first.publish(b"layout A")
        >>> first.is_complete(), list(first.missing())
        (False, [1])
        >>> second.publish(b"layout B")
        >>> first.is_complete(), first.values()
        (True, [b'layout A', b'layout B'])
    """

    number: int
    rank: int
    ranks: int
    shared: SignedStore

    @classmethod
    def following(cls, rank: int, ranks: int, shared: SignedStore) -> "Round":
        """Counts this rank into the round after its last one."""
        return cls(shared.store.add(f"count/{rank}", 1), rank, ranks, shared)

    def publish(self, value: bytes) -> None:
        """Publishes the value of this rank. The last rank that comes joins all."""
        self.shared.set(self._key(self.rank), value)
        if self.shared.store.add(self._count, 1) >= self.ranks:
            self.join()

    def join(self) -> None:
        """Joins the values, if all ranks have come."""
        keys = list(map(self._key, range(self.ranks)))
        if not self.shared.store.check(keys):
            return
        values = self.shared.get(keys)
        indices = {value: index for index, value in enumerate(dict.fromkeys(values))}
        runs = [(indices[value], len(list(same))) for value, same in groupby(values)]
        self.shared.set(self._joined, pickle.dumps((list(indices), runs)))

    def is_complete(self) -> bool:
        """Asks the store whether the values are joined."""
        return bool(self.shared.store.check([self._joined]))

    def missing(self) -> Iterator[int]:
        """Yields the ranks that have not come, by requests for halves of the ranks."""
        yield from absent(self.shared.store, list(map(self._key, range(self.ranks))))

    def first(self) -> int:
        """Finds the lowest rank that has come; this one has."""
        missing = self.missing()
        return next(rank for rank in range(self.ranks) if rank != next(missing, None))

    def values(self) -> list[bytes]:
        """Reads the values of all ranks, once the round is complete."""
        distinct, runs = pickle.loads(self.shared.get([self._joined])[0])
        return [distinct[index] for index, count in runs for _ in range(count)]

    def forget(self, *, has_pieces: bool = False) -> None:
        """Removes what this rank has left, once the next round is complete: all have read it.

        With `has_pieces`, a value may be in pieces: that takes a request more.
        """
        delete = self.shared.delete if has_pieces else self.shared.store.delete_key
        delete(self._key(self.rank))
        if self.rank == 0:
            delete(self._joined)
            self.shared.store.delete_key(self._count)

    def _key(self, rank: int) -> str:
        return f"{self.number}/{rank}"

    @property
    def _count(self) -> str:
        return f"{self.number}/count"

    @property
    def _joined(self) -> str:
        return f"{self.number}/all"


@frozen
class Message:
    """A value of one rank, and the call and the line at which the rank is."""

    what: str
    line: str
    value: Any

    def pack(self, rank: int) -> bytes:
        """Pickles it; with a `_Refusal` as its value, if that cannot be pickled."""
        try:
            return pickle.dumps(self)
        except Exception as error:  # noqa: BLE001 - whatever the value raises
            kind = type(self.value).__name__
            problem = ArgumentProblem(
                name=self.what,
                expected="a value that can be pickled",
                got=f"one of type {kind!r} on rank {rank} ({describe_error(error)})",
                remedy=_REMEDY,
                rank=rank,
            )
            return pickle.dumps(evolve(self, value=_Refusal(problem)))

    def unpack(self, packed: bytes, rank: int) -> "Message":
        """Unpickles the message that `rank` has packed for the same call.

        Raises:
            ArgumentProblem: If its value could not be pickled there, or cannot be read here.
        """
        try:
            # A rank of this job has written it: the store has verified its signature (ADR 42).
            message: Message = pickle.loads(packed)
        except Exception as error:
            raise ArgumentProblem(
                name=self.what,
                expected="a value that other ranks can unpickle",
                got=f"one of rank {rank} that raises {describe_error(error)}",
                remedy=_REMEDY,
                rank=rank,
            ) from error
        if isinstance(message.value, _Refusal):
            raise mark_shared(message.value.problem)
        return message


@frozen
class _Refusal:
    problem: ShardcoreError
