"""A line about a wait that takes long: for what, and until when."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from shardcore.reporting.errors import say

# The seconds after which a wait is not silent any more.
SECONDS = 5.0


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
    timer = threading.Timer(SECONDS, say, (text,))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
