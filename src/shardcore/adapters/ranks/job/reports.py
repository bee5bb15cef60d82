"""Reports of ranks to the process that has started them: a result or a failure, pickled.

Only the process of the rank reports. One that the function has forked may return from it too.
"""

import atexit
import os
import pickle
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from typing import NoReturn

from shardcore.adapters.ranks.job import started_ranks
from shardcore.adapters.ranks.job.started_ranks import REMEDY, Failure
from shardcore.domain.errors import ArgumentProblem, describe_error, text_of
from shardcore.reporting.errors import say, show_error, strip_own_frames


def report_of(rank: int, work: Callable[[], object], dump: Callable[[object], bytes]) -> bytes:
    """Does the work of a rank, runs its exit functions, and returns its report.

    In a process that the work has forked it does not return.

    Args:
        rank: The rank.
        work: It returns the result.
        dump: Pickles.
    """
    own = os.getpid()
    try:
        value = work()
        if os.getpid() != own:
            _end_fork(None)
        try:
            report = dump(("result", value))
        except Exception as error:  # noqa: BLE001 - whatever the value raises
            return _refuse(rank, value, error)
        atexit._run_exitfuncs()  # noqa: SLF001 - a rank does not run them by itself
    except BaseException as error:  # noqa: BLE001 - SystemExit too: the parent reports it
        if os.getpid() != own:
            _end_fork(error)
        report = pickle.dumps(("failure", Failure.of(rank, error)))
    return report


def _refuse(rank: int, value: object, error: Exception) -> bytes:
    """Returns the report of a result that cannot be pickled."""
    problem = ArgumentProblem(
        name=f"the result of rank {rank}",
        expected="a value that can be pickled",
        got=f"one of type {type(value).__name__!r} ({describe_error(error)})",
        remedy=REMEDY,
    )
    failure = Failure(rank, time.monotonic(), f"rank {rank} failed:\n{problem}\n")
    return pickle.dumps(("failure", failure))


def _end_fork(error: BaseException | None) -> NoReturn:
    """Ends a process that is no rank, as Python ends a program: the rank may ask for its code.

    Its exit functions are those of the rank, which runs them.
    """
    code = 0
    if isinstance(error, SystemExit):
        if isinstance(error.code, int):
            code = error.code & 0xFF  # as a process has it
        elif error.code is not None:
            say(f"{text_of(error.code)}\n")
            code = 1
    elif error is not None:
        strip_own_frames(error)
        show_error(sys.excepthook, error)
        code = 1
    with suppress(Exception):
        started_ranks.flush()
    os._exit(code)
