"""Calls of functions of other packages, which may raise anything, or never return."""

import ctypes
import threading
from collections.abc import Callable
from typing import TypeVar

from shardcore.domain.errors import PluginError
from shardcore.reporting.errors import waiting

T = TypeVar("T")

# The seconds that the import of a plug-in, or a hook of it, may take.
SECONDS = 60.0


def call(function: Callable[[], T], name: str, package: str) -> T:
    """Calls `function`, which another package has written.

    It runs on another thread: only there can it be left alone if it hangs, and an interrupt of the
    user differs from a KeyboardInterrupt of the package.

    Args:
        function: The function.
        name: Its name, for messages: "shardcore_strategies()".
        package: The package.

    Raises:
        PluginError: If it raises anything, or has not returned after `SECONDS`.

    Example:
        >>> call(lambda: 3, "three()", "numbers")
        3
    """
    returned: list[T] = []
    raised: list[BaseException] = []

    def run() -> None:
        try:
            returned.append(function())
        except BaseException as error:  # noqa: BLE001 - SystemExit too: it is not ours
            raised.append(error)

    thread = threading.Thread(target=run, name=f"shardcore-plugin {name}", daemon=True)
    thread.start()
    with waiting(f"shardcore waits for package {package!r}: {name}", SECONDS):
        thread.join(SECONDS)
    if returned:
        return returned[0]
    if raised:
        message = " ".join(f"{type(raised[0]).__name__}: {raised[0]}".split())
        raise PluginError(f"{name} failed: {message}") from raised[0]
    _end(thread)
    raise PluginError(f"{name} has not returned after {SECONDS:g} seconds")


def _end(thread: threading.Thread) -> None:
    """Ends a thread at its next line of Python: it would take time and memory for ever."""
    if thread.ident is not None:
        number, error = ctypes.c_ulong(thread.ident), ctypes.py_object(SystemExit)
        ctypes.pythonapi.PyThreadState_SetAsyncExc(number, error)
