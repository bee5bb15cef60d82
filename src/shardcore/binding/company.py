"""Work that all ranks do together: where it fails on one, the same error is raised on all.

A rank that went on after a failure would be alone in its next collective.
"""

import pickle
from collections.abc import Callable

import attrs

from shardcore.binding.session import Session, Sessions
from shardcore.domain.errors import StrategyError


@attrs.define(eq=False)
class _Company:
    """Ranks at such work.

    Args:
        session: Their session.
        failures: What each rank failed with, once they know that one has.
    """

    session: Session
    failures: list[Exception | None] | None = None


def in_company(work: Callable[[], None], what: str, session: Session, sessions: Sessions) -> None:
    """Do this rank's part of `work`; if any rank's fails, raise the first such error on every rank.

    Args:
        work: What this rank does. What it gathers is gathered on all ranks, in the same order.
        what: The work, for messages: "save 'a.keras'".
        session: The session of the ranks.
        sessions: All of them, which know of the work while it is done.

    Raises:
        StrategyError: In place of an error that cannot be told to other processes.
    """
    own: Exception | None = None
    before = sessions.company
    sessions.company = company = _Company(session)
    try:
        work()
    except Exception as error:  # noqa: BLE001 - raised again, below, when it is told
        if company.failures is None:
            own = _tellable(error, what, session)
    finally:
        sessions.company = before
    if company.failures is None:
        company.failures = session.processes.gather(own)
    for rank, failure in enumerate(company.failures):
        if failure is not None:
            raise own if own is not None and rank == session.processes.rank else failure


def heed(is_collective: Callable[[], bool], sessions: Sessions) -> None:
    """Before a collective of such work: raise the first error if a rank has failed.

    If Keras goes on after that error, it is raised again here, and by `in_company` at the end: the
    ranks that have failed wait in no further collective.

    Args:
        is_collective: Whether what follows is one; asked only inside such work.
        sessions: They know of the work.
    """
    company: _Company | None = sessions.company
    if company is None or not is_collective():
        return
    if company.failures is None:
        failures = company.session.processes.gather(None)
        if all(failure is None for failure in failures):
            return
        company.failures = failures
    raise next(failure for failure in company.failures if failure is not None)


def _tellable(error: Exception, what: str, session: Session) -> Exception:
    """`error`, or one in its place that another process can read."""
    rank = session.processes.rank
    error.add_note(f"Rank {rank} could not {what}: every rank raises this error.")
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:  # noqa: BLE001 - a stranger's error may fail in any way
        substitute = StrategyError(f"Rank {rank} could not {what}: {error!r}")
        substitute.__cause__ = error
        return substitute
    return error
