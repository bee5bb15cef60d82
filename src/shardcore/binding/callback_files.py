"""Seam: the files of callbacks. Every rank reads them, rank 0 writes them."""

import os
from collections.abc import Callable
from typing import Any

import attrs

from shardcore.binding.session import Sessions

# The functions of `keras.src.utils.file_utils` that change a file system, as callbacks use them.
WRITES = ("copy", "makedirs", "remove", "rmtree")


@attrs.frozen
class OneWriter:
    """What stands in for the module `file_utils` inside the callbacks that keep files.

    Args:
        file_utils: The module.
        sessions: Where the session of the distribution is found.
    """

    file_utils: Any
    sessions: Sessions

    def __getattr__(self, name: str) -> Any:
        function = getattr(self.file_utils, name)
        return self._unless_reader(function) if name in WRITES else function

    def File(self, path: str, mode: str = "r") -> Any:  # noqa: N802 - Keras' name
        """An open file; what another rank than 0 writes goes nowhere."""
        if self._is_reader() and not mode.startswith("r"):
            return open(os.devnull, mode)
        return self.file_utils.File(path, mode)

    def _is_reader(self) -> bool:
        session = self.sessions.current()
        return session is not None and session.processes.rank != 0

    def _unless_reader(self, function: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *args: None if self._is_reader() else function(*args)
