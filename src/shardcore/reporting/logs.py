"""The log: Python's own, under the name `shardcore`; `SHARDCORE_LOG` turns it on.

SHARDCORE_LOG=debug                every message, on rank 0
SHARDCORE_LOG=debug,all-ranks      every message, on every rank
SHARDCORE_LOG=variables            the debug messages of one subject, "shardcore.variables"
"""

import logging
import os
import sys
from collections.abc import Callable, Mapping

from shardcore.domain.errors import printable

VARIABLE = "SHARDCORE_LOG"
LEVELS = ("debug", "info", "warning", "error")


class Log(logging.LoggerAdapter[logging.Logger]):
    """The log of a subject. What it is given of names and errors is printable, for any handler."""

    def log(
        self, level: int, msg: object, *args: object, stacklevel: int = 1, **options: object
    ) -> None:
        """Logs a message."""
        if self.isEnabledFor(level):
            cleaned = printable(str(msg)), *map(_without_control, args)
            super().log(level, *cleaned, stacklevel=stacklevel + 1, **options)  # type: ignore[arg-type]


def log_of(subject: str) -> Log:
    """Opens the log of a subject, such as "checkpoints"."""
    return Log(logging.getLogger(f"shardcore.{subject}"), {})


def _without_control(value: object) -> object:
    text = str(value)
    cleaned = printable(text)
    return value if cleaned == text else cleaned


def configure(rank: Callable[[], int]) -> Callable[[], None]:
    """Shows the log on standard error, as `SHARDCORE_LOG` asks; by default "info" on rank 0.

    Does nothing if the program has set the log up with the logging module.

    Args:
        rank: A function that returns the rank of this process.

    Returns:
        A function that restores the log.
    """
    root = logging.getLogger("shardcore")
    words = [word.strip() for word in os.environ.get(VARIABLE, "").lower().split(",")]
    if root.handlers or (logging.getLogger().handlers and not any(words)):
        return lambda: None
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("[shardcore rank %(rank)s] %(message)s"))

    def passes(record: logging.LogRecord) -> bool:
        own = rank()
        record.__dict__["rank"] = own
        return own == 0 or "all-ranks" in words

    handler.addFilter(passes)
    root.addHandler(handler)
    root.propagate = False
    subjects = [word for word in words if word and word not in (*LEVELS, "all-ranks")]
    levels = [word for word in words if word in LEVELS]
    wanted = {root: (levels or ["info"])[0].upper()}
    wanted |= {logging.getLogger(f"shardcore.{subject}"): "DEBUG" for subject in subjects}
    before = {logger: logger.level for logger in wanted}
    _set_levels(wanted)

    def undo() -> None:
        root.removeHandler(handler)
        root.propagate = True
        _set_levels(before)

    return undo


def _set_levels(levels: Mapping[logging.Logger, str | int]) -> None:
    for logger, level in levels.items():
        logger.setLevel(level)
