"""Uncaught errors without the frames of this package, and lines about waits that take long."""

import logging
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from itertools import pairwise
from pathlib import Path
from traceback import walk_stack
from types import FrameType, TracebackType

from shardcore.domain.errors import RankFailed, printable

PACKAGE = str(Path(__file__).parents[1])
LIBRARIES = ("site-packages", "dist-packages", str(Path(logging.__file__).parents[1]), "<frozen")
# How the file names of the code begin that is generated for captured steps. They are in no brackets
# `<>`, for whose files `linecache` asks no loader.
CAPTURED = "shardcore-captured-step-"
# The begin of a note on an error that one rank has, and all raise.
RANK_COULD_NOT = r"Rank \d+ could not "


def show_user_frames() -> Callable[[], None]:
    """Sets `sys.excepthook`, so that an error of the user's code is shown without our frames.

    Returns:
        Restores the hook.
    """
    before = sys.excepthook

    def show(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        strip_own_frames(error)
        before(kind, error, error.__traceback__)

    def undo() -> None:
        if sys.excepthook is show:
            sys.excepthook = before

    sys.excepthook = show
    return undo


def strip_own_frames(error: BaseException) -> None:
    """Removes the frames of shardcore from the traceback of an error in the user's code.

    The error counts as the user's if the innermost frame outside of libraries is; the error of a
    rank that this process reports does too. Any other error keeps its traceback, because it may be
    a bug of shardcore. So do all while the log is at debug. The same holds for the errors that
    caused it, which may be a circle.
    """
    stripped: set[int] = set()
    waiting: list[BaseException | None] = [error]
    while waiting:
        cause = waiting.pop()
        if cause is not None and id(cause) not in stripped:
            stripped.add(id(cause))
            waiting += [cause.__cause__, cause.__context__]
            _strip(cause)


def say(text: str) -> None:
    """Writes `text` to standard error in one piece, so that lines of several ranks do not mix.

    Control characters, which may be of another rank, do not reach the terminal.
    """
    text = printable(text)
    with suppress(OSError):  # standard error is closed
        sys.stderr.write(text)
        sys.stderr.flush()


def user_line(frame: FrameType | None) -> str:
    """Returns the innermost line of the user's code in a stack, such as "train.py:12".

    Example:
        >>> user_line(None)
        'an unknown line'
    """
    for caller, line in walk_stack(frame) if frame else ():
        file = caller.f_code.co_filename
        if _owner(file) == "user":
            return f"{Path(file).name}:{line}"
    return "an unknown line"


def user_line_in(error: BaseException) -> str:
    """Returns the innermost line of the user's code in the traceback of an error.

    Example:
        >>> user_line_in(ValueError("of no line"))
        'an unknown line'
    """
    trace, line = error.__traceback__, "an unknown line"
    while trace is not None:
        if _owner_of(trace) == "user":
            line = f"{Path(trace.tb_frame.f_code.co_filename).name}:{trace.tb_lineno}"
        trace = trace.tb_next
    return line


def _strip(error: BaseException) -> None:
    frames, trace = [], error.__traceback__
    while trace is not None:
        frames.append(trace)
        trace = trace.tb_next
    ours = [frame for frame in frames if _owner_of(frame) in ("shardcore", "user")]
    inner = ours[-1] if ours else None
    debugged = logging.getLogger("shardcore").isEnabledFor(logging.DEBUG)
    if inner is None or debugged:
        return
    if _owner_of(inner) == "shardcore" and not isinstance(error, RankFailed):
        return
    kept = [frame for frame in frames if _owner_of(frame) not in ("shardcore", "python -m")]
    for outer, next_ in pairwise(kept):
        outer.tb_next = next_
    if kept:
        kept[-1].tb_next = None
    error.__traceback__ = kept[0] if kept else None


def _owner_of(trace: TracebackType) -> str:
    return _owner(trace.tb_frame.f_code.co_filename)


def _owner(file: str) -> str:
    if file.startswith((PACKAGE, CAPTURED)):
        return "shardcore"
    if file == "<frozen runpy>":
        return "python -m"
    return "library" if any(folder in file for folder in LIBRARIES) else "user"


# The seconds after which a wait is not silent any more.
WAIT_SECONDS = 5.0


@contextmanager
def waiting(what: str, limit: float) -> Iterator[None]:
    """Opens a wait for `limit` seconds at most; if it takes long, a line on standard error says so.

    Args:
        what: Who waits for what: "Rank 1 waits for rank 0".
        limit: The most seconds.

    Example:
        >>> with waiting("Rank 1 waits for rank 0", limit=60.0):
        ...     pass
    """
    end = time.strftime("%H:%M:%S", time.localtime(time.time() + limit))
    text = f"{what}, at most until {end} ({limit:.0f} seconds in all).\n"
    timer = threading.Timer(WAIT_SECONDS, say, (text,))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
