"""All processes at one place of the program, or an error that says who is missing."""

import time

import attrs

from shardcore.domain.errors import RankMismatchError

PATIENCE_SECONDS = 60.0
_POLL_SECONDS = 0.02


@attrs.define
class Meetings:
    """The meetings of this process with the others, in order.

    A barrier would wait for ever for a rank that never comes, and would take another collective
    of that rank for its answer. The store of the job keeps the two apart.
    """

    rank: int
    world_size: int
    _count: int = attrs.field(default=0, init=False)

    def meet(self, what: str) -> None:
        """Wait until every rank has come to `what`.

        Raises:
            RankMismatchError: If one did not within a minute, or came to another place.
        """
        # Here: it needs DTensor, which a process alone does without.
        from shardcore.adapters import torch_compat

        self._count += 1
        store = torch_compat.store_for_thread(f"shardcore/meeting/{self._count}")
        store.set(str(self.rank), what)
        deadline = time.monotonic() + PATIENCE_SECONDS
        others = [str(rank) for rank in range(self.world_size)]
        while not store.check(others):
            if time.monotonic() > deadline:
                raise self._missing(what, [r for r in others if not store.check([r])])
            time.sleep(_POLL_SECONDS)
        for rank in others:
            found = store.get(rank).decode()
            if found != what:
                raise RankMismatchError(
                    f"Rank {self.rank} came to {what}, rank {rank} to {found}: every rank must "
                    "make the same calls in the same order."
                )

    def _missing(self, what: str, missing: list[str]) -> RankMismatchError:
        return RankMismatchError(
            f"Rank {self.rank} came to {what}, but rank {', '.join(missing)} did not within "
            f"{PATIENCE_SECONDS:.0f} seconds. Sharded values are gathered from all ranks, so call "
            "it on every rank, not on one: rank 0 writes the file."
        )
