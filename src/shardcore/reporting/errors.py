"""Uncaught errors without the frames of this package, and lines about waits that take long."""

import logging
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from itertools import pairwise
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

from shardcore.domain.errors import RankFailed, describe_error, printable

PACKAGE = str(Path(__file__).parents[1])
LIBRARIES = ("site-packages", "dist-packages", str(Path(logging.__file__).parents[1]), "<frozen")
# How the file names of the code begin that is generated for captured steps. They are in no brackets
# `<>`, for whose files `linecache` asks no loader.
CAPTURED = "shardcore-captured-step-"
# The begin of a note on an error that one rank has, and all raise.
RANK_COULD_NOT = r"Rank \d+ could not "

Hook = Callable[[type[BaseException], BaseException, TracebackType | None], object]


def show_user_frames() -> Callable[[], None]:
    """Sets `sys.excepthook`, so that an error of the user's code is shown without our frames.

    Returns:
        Restores the hook.
    """
    before = sys.excepthook

    def show(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        strip_own_frames(error)
        before(kind, error, traceback_of(error))

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
            waiting += [_attribute(cause, "__cause__"), _attribute(cause, "__context__")]
            _strip(cause)


def traceback_of(error: BaseException) -> TracebackType | None:
    """Reads the traceback of an error, also if its class replaces the attribute.

    Example:
        >>> traceback_of(ValueError("of no line")) is None
        True
    """
    trace: TracebackType | None = _attribute(error, "__traceback__")
    return trace


def _attribute(error: BaseException, name: str) -> Any:
    """Reads what Python itself has stored: a property of the error's class may raise."""
    return vars(BaseException)[name].__get__(error)


def format_error(error: BaseException) -> str:
    r"""Formats an error with its traceback, as far as its attributes can be read.

    Example:
        >>> format_error(ValueError("of no line"))
        'ValueError: of no line\n'
    """
    trace = traceback_of(error)
    if _can_be_formatted(error):
        return "".join(traceback.format_exception(type(error), error, trace))
    title = "Traceback (most recent call last):\n" if trace else ""
    return "".join([title, *traceback.format_tb(trace), describe_error(error), "\n"])


def _can_be_formatted(error: BaseException) -> bool:
    """Tries whether Python can show all of an error: a property of its class may raise."""
    try:
        traceback.format_exception(type(error), error, traceback_of(error))
    except Exception:  # noqa: BLE001 - whatever the code of the error raises
        return False
    return True


def show_error(hook: Hook, error: BaseException) -> None:
    """Shows an error by `hook`, a `sys.excepthook`; by Python's hook if that one fails.

    Of an error that Python cannot format, its hook prints the address alone.
    """
    for show in (hook, sys.__excepthook__) if _can_be_formatted(error) else ():
        try:
            show(type(error), error, traceback_of(error))
        except SystemExit:  # by a hook that has shown it
            return
        except BaseException:  # noqa: BLE001 - the hook is the program's
            continue
        return
    say(format_error(error))


def say(text: str) -> None:
    """Writes `text` to standard error in one piece, so that lines of several ranks do not mix.

    Control characters, which may be of another rank, do not reach the terminal.
    """
    text = printable(text)
    with suppress(Exception):  # standard error is closed, or the program has replaced it
        sys.stderr.write(text)
        sys.stderr.flush()


def user_line(frame: FrameType | None) -> str:
    """Finds the innermost line of the user's code in a stack, such as "train.py:12".

    Example:
        >>> user_line(None)
        'an unknown line'
    """
    for caller, line in traceback.walk_stack(frame) if frame else ():
        file = caller.f_code.co_filename
        if _owner(file) == "user":
            return f"{Path(file).name}:{line}"
    return "an unknown line"


def user_line_in(error: BaseException) -> str:
    """Finds the innermost line of the user's code in the traceback of an error.

    Example:
        >>> user_line_in(ValueError("of no line"))
        'an unknown line'
    """
    trace, line = traceback_of(error), "an unknown line"
    while trace is not None:
        if _owner_of(trace) == "user":
            line = f"{Path(trace.tb_frame.f_code.co_filename).name}:{trace.tb_lineno}"
        trace = trace.tb_next
    return line


def _strip(error: BaseException) -> None:
    frames, trace = [], traceback_of(error)
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
    vars(BaseException)["__traceback__"].__set__(error, kept[0] if kept else None)


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
