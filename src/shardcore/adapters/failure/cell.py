"""The last cell of a notebook whose engines are the ranks (ADR 57), as this rank has run it.

A rank of a notebook goes on after an error that all ranks have. If one waits for another in vain,
they are no longer at one point of the program: the error ends all ranks then.
"""

import attrs

from shardcore.adapters.failure.end import headline_of
from shardcore.adapters.failure.main_thread import is_in_collective
from shardcore.adapters.job import exchange
from shardcore.adapters.job.signed_store import SignedStore


@attrs.define
class Cell:
    """The error with which the cell has ended: the main thread notes it, the watch publishes it.

    Attributes:
        headline: The error in a line; empty if there is none, or while a cell runs.
    """

    headline: str = attrs.field(default="", init=False)
    _waited_in_vain: bool = attrs.field(default=False, init=False)

    def note(self, error: BaseException | None) -> None:
        """Notes the error of the cell; None if there is none, or if another cell begins."""
        self._waited_in_vain = getattr(error, "waited_in_vain", False)
        self.headline = "" if error is None else headline_of(type(error), error)

    @property
    def status(self) -> str:
        """The status of the rank after the error, as a predicate; empty without one."""
        return f"has ended its cell with {self.headline}" if self.headline else ""

    def ends_all(self, shared: SignedStore) -> bool:
        """Returns whether this rank has waited in vain, or another one waits in a collective.

        Nothing can interrupt a collective.
        """
        if not self.headline:
            return False
        return self._waited_in_vain or any(
            map(is_in_collective, exchange.statuses(shared).values())
        )
