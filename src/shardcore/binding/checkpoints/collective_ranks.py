"""The ranks that save or load together: who they are, and how they agree on errors."""

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import attrs
import keras

from shardcore.binding.engine import adoption
from shardcore.binding.ranks import rank_consistency
from shardcore.binding.ranks.collective_errors import raise_on_all_ranks
from shardcore.binding.ranks.session import Session, Sessions
from shardcore.domain.errors import CallProblem

Result = TypeVar("Result")


@attrs.frozen(eq=False)
class Ranks:
    """The ranks that save or load together. Without a session it is one process."""

    session: Session | None

    @classmethod
    def of_model(cls, model: keras.Model, sessions: Sessions, call: str) -> "Ranks":
        """Waits for the ranks of a model, and completes its state on them. A collective.

        Variables of before the distribution are laid out, and deferred sums of metrics reduced.

        Raises:
            CallProblem: If several ranks have no distribution, or this is another thread.
        """
        if threading.current_thread() is not threading.main_thread():
            raise CallProblem(
                f"{call}() was called on thread {threading.current_thread().name!r}: all ranks "
                "take part in it, so call it on the main thread.",
                name=threading.current_thread().name,
            )
        session = sessions.current() or sessions.session_of_model(model)
        if session is not None:
            session.processes.barrier(f"{call}()")
            adoption.adopt(model, session)
            sessions.sums.reduce()
        elif sessions.processes.world_size > 1:
            raise CallProblem(
                f"{call}() was called by {sessions.processes.world_size} processes without a "
                "distribution, each of which has a model by itself: set one first, such as "
                "keras.distribution.set_distribution(keras.distribution.DataParallel())."
            )
        return cls(session)

    @property
    def position(self) -> int:
        """The number of this rank in the mesh."""
        return 0 if self.session is None else self.session.world.position

    def run(self, work: Callable[[], Result], what: str) -> Result:
        """Does `work` on all ranks; if it fails on one, all raise its error."""
        return raise_on_all_ranks(work, what, self.session)

    def gather(self, value: object) -> list[Any]:
        """Gathers a value of each rank."""
        return [value] if self.session is None else self.session.processes.gather(value)

    def compare(self, facts: rank_consistency.Facts) -> None:
        """Compares facts that have to be equal on all ranks."""
        if self.session is not None:
            rank_consistency.compare(facts, self.session)

    def choose(self, choose: Callable[[], Path | None], what: str) -> Path | None:
        """Looks for a checkpoint on rank 0, so that all ranks have the same one, or None."""
        is_other = self.session is not None and self.session.processes.rank != 0
        chosen = self.run((lambda: None) if is_other else choose, what)
        path: Path | None = self.gather(chosen)[0]
        return path
