"""Work that all ranks do together: where it fails on one, the same error is raised on all.

A rank that went on after a failure would be alone in its next collective.
"""

import pickle
from collections.abc import Callable
from contextvars import ContextVar

import attrs

from shardcore.binding.session import Session
from shardcore.domain.errors import StrategyError

_company: ContextVar[Session | None] = ContextVar("company", default=None)


@attrs.frozen(eq=False)
class _FailedElsewhere(BaseException):
    """Ends the work of a rank when that of another has failed. No `except Exception` takes it."""

    failures: list[Exception | None]


def in_company(work: Callable[[], None], what: str, session: Session) -> None:
    """Do this rank's part of `work`; if any rank's fails, raise the first such error on every rank.

    Args:
        work: What this rank does. What it gathers is gathered on all ranks, in the same order.
        what: The work, for messages: "save 'a.keras'".
        session: The session of the ranks.

    Raises:
        StrategyError: In place of an error that cannot be told to other processes.
    """
    own: Exception | None = None
    before = _company.set(session)
    try:
        work()
        failures = session.processes.gather(None)
    except _FailedElsewhere as told:
        failures = told.failures
    except Exception as error:  # noqa: BLE001 - raised again, below, when it is told
        own = _tellable(error, what, session)
        failures = session.processes.gather(own)
    finally:
        _company.reset(before)
    for rank, failure in enumerate(failures):
        if failure is not None:
            raise own if own is not None and rank == session.processes.rank else failure


def heed(is_collective: Callable[[], bool]) -> None:
    """Before a collective of such work: go on only if no rank has failed.

    Args:
        is_collective: Whether what follows is one; asked only inside such work.
    """
    session = _company.get()
    if session is None or not is_collective():
        return
    failures = session.processes.gather(None)
    if any(failure is not None for failure in failures):
        raise _FailedElsewhere(failures)


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
