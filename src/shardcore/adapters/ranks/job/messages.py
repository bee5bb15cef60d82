"""Messages of ranks through the store: a value, with the call and the line of its rank.

What cannot be pickled is replaced by an error that all ranks raise: none waits in vain.
"""

import pickle
from typing import Any

from attrs import evolve, frozen

from shardcore.domain.errors import ArgumentProblem, ShardcoreError, describe_error, mark_shared

_REMEDY = "give numbers, texts, arrays, or lists and dicts of them"


@frozen
class Message:
    """A value of one rank, and the call and the line at which the rank is."""

    what: str
    line: str
    value: Any

    def pack(self, rank: int) -> bytes:
        """Returns it pickled; with a `Refusal` as its value, if that cannot be pickled."""
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
            return pickle.dumps(evolve(self, value=Refusal(problem)))

    def unpack(self, packed: bytes, rank: int) -> "Message":
        """Returns the message that `rank` has packed for the same call.

        Raises:
            ArgumentProblem: If its value could not be pickled there, or cannot be read here.
        """
        try:
            message: Message = pickle.loads(packed)
        except Exception as error:
            raise ArgumentProblem(
                name=self.what,
                expected="a value that other ranks can unpickle",
                got=f"one of rank {rank} that raises {describe_error(error)}",
                remedy=_REMEDY,
                rank=rank,
            ) from error
        if isinstance(message.value, Refusal):
            raise mark_shared(message.value.problem)
        return message


@frozen
class Refusal:
    """The place of a value that cannot be pickled."""

    problem: ShardcoreError
