"""The ranks that are late, by their heartbeats: a stopped rank sends none (ADR 37)."""

from collections.abc import Sequence

import attrs


@attrs.frozen
class Heartbeat:
    """A heartbeat of a rank.

    Args:
        number: How many came before.
        waits: Whether its main thread waits in a collective of tensors.
        line: The line of the user's code that it runs.
    """

    number: int
    waits: bool
    line: str


@attrs.frozen
class Observation:
    """The heartbeats of other ranks at two moments, a few seconds apart.

    Args:
        before: The last heartbeats at first, by rank.
        after: The last heartbeats then.
        ended: The ranks that have ended in order.

    Example:
        >>> waits, works = Heartbeat(3, True, "fit.py:8"), Heartbeat(4, False, "fit.py:9")
        >>> Observation({0: waits, 1: waits}, {0: attrs.evolve(waits, number=7), 1: works}).late()
        'rank 1, which computes (fit.py:9)'
    """

    before: dict[int, Heartbeat | None]
    after: dict[int, Heartbeat | None]
    ended: tuple[int, ...] = ()

    def waiting(self) -> list[int]:
        """Lists the ranks that answer, and wait in a collective."""
        if self.ended:  # it is not known which ranks answer
            waits = (rank for rank, beat in self.after.items() if beat and beat.waits)
            return [rank for rank in waits if rank not in self.ended]
        return [rank for rank, beat in self.after.items() if beat and not self._is_late(rank)]

    def late(self) -> str:
        """Names the ranks for which the others wait, and where they are."""
        if self.ended:
            return name_ended_ranks(self.ended)
        late = [rank for rank in self.after if self._is_late(rank)]
        if late:
            return "; ".join(f"rank {rank}, {self._where(rank)}" for rank in late)
        return f"no rank: all wait, in different collectives ({self.lines()})"

    def lines(self) -> str:
        """Lists the lines of the ranks at first: one that has failed since runs another line."""
        return "; ".join(
            f"rank {rank} at {beat.line}" for rank, beat in self.before.items() if beat
        )

    def _is_late(self, rank: int) -> bool:
        beat = self.after[rank]
        return beat is None or beat == self.before[rank] or not beat.waits

    def _where(self, rank: int) -> str:
        beat = self.after[rank]
        if beat is None:
            return "which has sent no heartbeat"
        if beat == self.before[rank]:
            last = f"last seen at {beat.line}"
            return f"which does not answer ({last}): stopped, or its network stalls"
        return f"which computes ({beat.line})"


def name_ended_ranks(ranks: Sequence[int]) -> str:
    """Names the ranks that have ended, for a sentence about whom others wait for."""
    return ", ".join(f"rank {rank}, which has ended" for rank in ranks)
