"""The log: Python's own, under the name `shardcore`; `SHARDCORE_LOG` turns it on.

SHARDCORE_LOG=debug                every message, on rank 0
SHARDCORE_LOG=debug,all-ranks      every message, on every rank
SHARDCORE_LOG=variables            the debug messages of one subject, "shardcore.variables"
"""

import logging
import os
import sys
from collections.abc import Callable, Mapping

VARIABLE = "SHARDCORE_LOG"
LEVELS = ("debug", "info", "warning", "error")


class _RankFilter(logging.Filter):
    """Passes what rank 0 says, or every rank; puts the rank into the record."""

    def __init__(self, rank: Callable[[], int], *, all_ranks: bool) -> None:
        super().__init__()
        self._rank = rank
        self._all_ranks = all_ranks

    def filter(self, record: logging.LogRecord) -> bool:
        rank = self._rank()
        record.__dict__["rank"] = rank
        return self._all_ranks or rank == 0


def configure(rank: Callable[[], int]) -> Callable[[], None]:
    """Show the log on standard error, as `SHARDCORE_LOG` says; by default from "info" on rank 0.

    Does nothing where the program has set the log up by the logging module.

    Args:
        rank: Gives the rank of this process.

    Returns:
        Puts the log back as it was.
    """
    root = logging.getLogger("shardcore")
    words = [word.strip() for word in os.environ.get(VARIABLE, "").lower().split(",")]
    if root.handlers or (logging.getLogger().handlers and not any(words)):
        return lambda: None
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("[shardcore rank %(rank)s] %(message)s"))
    handler.addFilter(_RankFilter(rank, all_ranks="all-ranks" in words))
    root.addHandler(handler)
    root.propagate = False
    subjects = [each for each in words if each and each not in (*LEVELS, "all-ranks")]
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
