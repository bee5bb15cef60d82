"""What the ranks of a job tell each other beside the collectives: who failed, who has ended.

A few keys in the store that the process group itself was started with. Reading them takes a
constant number of requests, however many ranks there are.
"""

import json

from attrs import asdict, frozen
from torch.distributed.distributed_c10d import Store


@frozen
class Failure:
    """Why a rank failed.

    Attributes:
        rank: the rank that failed.
        headline: the error in one line.
        report: the whole traceback, or the headline once more where there is none.
    """

    rank: int
    headline: str
    report: str


@frozen
class JobBoard:
    """The board as one thread of one rank sees it. Every method may raise when the store is gone.

    Attributes:
        store: a connection of this thread's own; a wait on a shared one would block all others.
        rank: this rank.
    """

    store: Store
    rank: int

    def claim(self, failure: Failure) -> Failure:
        """Publishes the failure unless there is one; returns the one that stands, the first."""
        text = json.dumps(asdict(failure))
        return _failure(self.store.compare_set("first", "", text))

    def first(self) -> Failure | None:
        """The first failure, if there is one."""
        return _failure(self.store.get("first")) if self.store.check(["first"]) else None

    def acknowledge(self) -> None:
        """Says that this rank has seen the failure; once per rank."""
        self.store.add("acknowledged", 1)

    def count_informed(self) -> int:
        """How many ranks need no more news: they have seen the failure, or have let go."""
        return self.store.add("acknowledged", 0) + self.store.add("let_go", 0)

    def end(self) -> None:
        """Says that this rank has ended in order."""
        self.store.set(f"ended/{self.rank}", "")
        # `set` has no reply. A request that has one makes sure that the mark is there.
        self.store.add("let_go", 0)

    def has_ended(self, rank: int) -> bool:
        """Whether the rank has ended in order."""
        return self.store.check([f"ended/{rank}"])

    def let_go(self) -> None:
        """Says that this rank no longer needs the store; once per rank."""
        self.store.add("let_go", 1)

    def count_let_go(self) -> int:
        """How many ranks no longer need the store."""
        return self.store.add("let_go", 0)


def _failure(text: bytes) -> Failure:
    return Failure(**json.loads(text))
