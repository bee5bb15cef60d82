"""Python's garbage collection, paused by code that makes many objects without cycles."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def without_collection() -> Iterator[None]:
    """Pauses the collector, which walks through all objects again and again as their number grows.

    Inside of another pause it changes nothing.

    Example:
        >>> import gc
        >>> with without_collection():
        ...     gc.isenabled()
        False
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
