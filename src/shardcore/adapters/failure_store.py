"""The failure store: failures and ends of ranks, published in the store of the process group.

It is a few keys, which any number of ranks reads by a constant number of requests.
"""

import json
from typing import TYPE_CHECKING

from attrs import asdict, frozen

if TYPE_CHECKING:  # a torch without torch.distributed has no stores
    from torch.distributed.distributed_c10d import Store


@frozen
class Failure:
    """The failure of a rank."""

    rank: int
    headline: str  # the error in one line


@frozen
class FailureStore:
    """The store for one thread of one rank. Every method may raise if the store is closed."""

    # A connection for this thread alone; a wait on a shared one would block all others.
    store: "Store"
    rank: int

    def claim(self, failure: Failure) -> Failure:
        """Publishes the failure unless there is an earlier one; returns the first."""
        text = json.dumps(asdict(failure))
        return _failure(self.store.compare_set("first", "", text))

    def first(self) -> Failure | None:
        """Returns the first failure, if there is one."""
        return _failure(self.store.get("first")) if self.store.check(["first"]) else None

    def end(self) -> None:
        """Publishes that this rank has ended in order."""
        self.store.set(f"ended/{self.rank}", "")
        # `set` has no reply. A request with a reply ensures that the mark is stored.
        self.store.add("release", 0)

    def has_ended(self, rank: int) -> bool:
        """Returns whether the rank has ended in order."""
        return self.store.check([f"ended/{rank}"])

    def release(self) -> None:
        """Publishes that this rank no longer needs the store, or has read the failure; once."""
        self.store.add("release", 1)

    def count_released(self) -> int:
        """Returns the number of ranks that no longer need the store."""
        return self.store.add("release", 0)


def _failure(text: bytes) -> Failure:
    return Failure(**json.loads(text))
