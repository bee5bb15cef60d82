"""Seam: what callbacks write and send. Every rank reads files, rank 0 writes and sends."""

import os
from collections.abc import Callable
from typing import Any

import attrs

from shardcore.binding import seams
from shardcore.binding.session import Sessions
from shardcore.domain.errors import StrategyError

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
        return _is_other_rank(self.sessions)

    def _unless_reader(self, function: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *args: None if self._is_reader() else function(*args)


def send_once(original: Callable[..., None], sessions: Sessions) -> Callable[..., None]:
    """`RemoteMonitor.on_epoch_end`: rank 0 sends; where nobody can, every rank says so."""

    def on_epoch_end(monitor: Any, epoch: int, logs: Any = None) -> None:
        if not (seams.can_send() and _is_other_rank(sessions)):
            original(monitor, epoch, logs)

    return on_epoch_end


def refuse_orbax(original: Callable[..., None], sessions: Sessions) -> Callable[..., None]:
    """`OrbaxCheckpoint.set_model`: every rank would write whole values into one folder."""

    def set_model(callback: Any, model: Any) -> None:
        session = sessions.current()
        if session is not None and session.mesh.size > 1:
            raise StrategyError(
                f"OrbaxCheckpoint would write the same folder from each of {session.mesh.size} "
                "ranks: Keras knows how to share it on JAX only. Use ModelCheckpoint, whose file "
                "one rank writes."
            )
        original(callback, model)

    return set_model


def _is_other_rank(sessions: Sessions) -> bool:
    session = sessions.current()
    return session is not None and session.processes.rank != 0
