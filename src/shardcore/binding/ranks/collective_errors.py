"""Collective work: if it fails on one rank, all ranks raise the same error.

A rank that continued after a failure of another would wait for ever in its next collective (ADR 7).
"""

import pickle
from collections.abc import Callable
from typing import TypeVar

import attrs

from shardcore.binding.ranks.session import Session
from shardcore.domain.errors import (
    OtherRankFailed,
    ShardcoreError,
    describe_error,
    is_shared,
    mark_shared,
)
from shardcore.domain.scope import Scope
from shardcore.ports.world import Processes

Result = TypeVar("Result")


@attrs.define(eq=False)
class _CollectiveWork:
    """Work that ranks do together.

    Args:
        processes: The ranks.
        is_same_code: Whether all ranks run the same code, as in a callback: none writes alone.
        failures: The error of each rank after a failure.
    """

    processes: Processes
    is_same_code: bool
    failures: list[Exception | None] | None = None


# Keras calls, within the work, code that all-gathers or writes, and passes it no argument for it.
_work_scope = Scope[_CollectiveWork | None]("collective_work", default=None)


def raise_on_all_ranks(
    work: Callable[[], Result], what: str, session: Session | None, *, is_same_code: bool = False
) -> Result:
    """Does this rank's part of `work`; if a rank's fails, raises the first such error on all.

    All ranks start its collectives in the same order. Messages name it `what`: "save 'a.keras'". A
    ShardcoreError replaces an error that cannot be sent to other processes. With `is_same_code` all
    ranks run the same code in it. Without a session this process does it alone.
    """
    if session is None:
        return work()
    results: list[Result] = []  # empty after an error
    own: Exception | None = None
    processes = session.processes
    current = _CollectiveWork(processes, is_same_code)
    with _work_scope(current):
        try:
            results.append(work())
        except OtherRankFailed:  # this rank ends; it waits for no other
            raise
        except Exception as error:
            if is_shared(error):
                raise
            if current.failures is None:
                own = _picklable(error, what, processes, "every rank")
    if current.failures is None:
        current.failures = _gather_errors(own, processes)
    for rank, failure in enumerate(current.failures):
        if failure is not None:
            raise mark_shared(failure if own is None or rank != processes.rank else own)
    return results[0]


def raise_on_calling_ranks(work: Callable[[], None], what: str, processes: Processes) -> None:
    """Does `work` on one of the ranks that call this; if it fails, raises its error on them all.

    Messages name it `what`, as those of `raise_on_all_ranks` do.
    """

    def attempt() -> Exception | None:
        with _work_scope(_CollectiveWork(processes, is_same_code=False)):
            try:
                work()
            except OtherRankFailed:
                raise
            except Exception as error:  # noqa: BLE001 - raised again below
                return _picklable(error, what, processes, "every rank that does")
        return None

    failure = processes.do_once(attempt, what)
    if failure is not None:
        raise failure


def is_in_collective_work() -> bool:
    """Tells whether this runs in work that ranks do together."""
    return _work_scope.now() is not None


def do_all_ranks_run_this() -> bool:
    """Tells whether all ranks run this code together, as in a callback that saves.

    Where one rank writes and the others attend, the writer may save something more alone.
    """
    current = _work_scope.now()
    return current is not None and current.is_same_code


def check_other_ranks() -> None:
    """Raises the first error of a rank that has failed, before a collective of such work.

    If Keras handles that error, it is raised again here, and by `raise_on_all_ranks` at the end:
    the failed ranks join no further collective.
    """
    current = _work_scope.now()
    if current is None:
        return
    if current.failures is None:
        failures: list[Exception | None] = current.processes.gather(None)
        if all(failure is None for failure in failures):
            return
        current.failures = failures
    raise mark_shared(next(failure for failure in current.failures if failure is not None))


def _gather_errors(own: Exception | None, processes: Processes) -> list[Exception | None]:
    """Gathers the error of each rank. If a rank is in another call, raises this rank's, if any."""
    try:
        return processes.gather(own)
    except OtherRankFailed:
        raise
    except Exception as error:
        if own is None or error is own:
            raise
        raise own from error


def _picklable(error: Exception, what: str, processes: Processes, who: str) -> Exception:
    """Replaces an `error` that no other process could read; a note says that `who` raises it."""
    rank = processes.rank
    try:
        error.add_note(f"Rank {rank} could not {what}: {who} raises this error.")
        pickle.loads(pickle.dumps(error))
    except Exception:  # noqa: BLE001 - a third party's error may fail in any way
        problem = f"Rank {rank} could not {what}: {describe_error(error)}"
        substitute = ShardcoreError(problem, rank=rank)
        substitute.__cause__ = error
        return substitute
    return error
