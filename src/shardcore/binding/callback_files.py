"""Seams: what callbacks write, send and show. Every rank reads files, rank 0 does the rest."""

import io
import os
from collections.abc import Callable
from tempfile import TemporaryDirectory
from typing import Any

import attrs

from shardcore.binding import seams
from shardcore.binding.session import Session, Sessions
from shardcore.domain.errors import StrategyError

# The functions of `keras.src.utils.file_utils` that change a file system, as callbacks use them.
WRITES = ("copy", "makedirs", "remove", "rmtree")


@attrs.frozen
class OneWriter:
    """Stands in for the module `file_utils` inside the callbacks that keep files."""

    sessions: Sessions
    file_utils: Any

    def __getattr__(self, name: str) -> Any:
        function = getattr(self.file_utils, name)
        if name not in WRITES:
            return function
        return lambda *args: None if _is_other_rank(self.sessions) else function(*args)

    def File(self, path: str, mode: str = "r") -> Any:  # noqa: N802 - Keras' name
        """An open file; what another rank than 0 writes goes nowhere."""
        if not _is_other_rank(self.sessions) or not set(mode) & set("wax+"):
            return self.file_utils.File(path, mode)
        if "r" not in mode:
            return open(os.devnull, mode)
        with self.file_utils.File(path, mode.replace("+", "")) as there:  # read, then written
            content = there.read()
        return io.BytesIO(content) if isinstance(content, bytes) else io.StringIO(content)


def one_summary(sessions: Sessions, original: property) -> property:
    """`TensorBoard.summary`, TensorFlow's module: files of other ranks than 0 are deleted."""

    def summary(callback: Any) -> Any:
        module = original.__get__(callback)
        return _Unread(module) if _is_other_rank(sessions) else module

    return property(summary)


@attrs.frozen
class _Unread:
    """What stands in for the module `tensorflow.summary`: its files are deleted with their writer.

    Nothing less would do: a writer that writes nothing reads nothing either, and rank 0 would be
    alone in gathering the weights of a histogram.
    """

    module: Any

    def __getattr__(self, name: str) -> Any:
        return getattr(self.module, name)

    def create_file_writer(self, logdir: str) -> Any:
        """A writer to a folder of its own instead of `logdir`."""
        folder = TemporaryDirectory(prefix="shardcore-unread-")
        writer = self.module.create_file_writer(folder.name)
        writer._shardcore_folder = folder
        return writer


def send_once(sessions: Sessions, original: Callable[..., None], *args: Any, **logs: Any) -> None:
    """`RemoteMonitor.on_epoch_end`: rank 0 sends; where none can, every rank says so."""
    if not (seams.can_send() and _is_other_rank(sessions)):
        original(*args, **logs)


def refuse_orbax(
    session: Session, original: Callable[..., None], callback: Any, model: Any
) -> None:
    """`OrbaxCheckpoint.set_model`: every rank would write whole values into one folder."""
    if session.mesh.size > 1:
        raise StrategyError(
            f"OrbaxCheckpoint would write the same folder from each of {session.mesh.size} "
            "ranks: Keras knows how to share it on JAX only. Use ModelCheckpoint, whose file "
            "one rank writes."
        )
    original(callback, model)


def print_once(sessions: Sessions, original: Callable[..., None], *args: Any, **line: Any) -> None:
    """`print_msg`: rank 0 prints."""
    if not _is_other_rank(sessions):
        original(*args, **line)


def show_once(sessions: Sessions, original: Callable[..., None], bar: Any, params: Any) -> None:
    """`ProgbarLogger.set_params`: rank 0 shows progress."""
    original(bar, params)
    if _is_other_rank(sessions):
        bar.verbose = 0


def _is_other_rank(sessions: Sessions) -> bool:
    session = sessions.current()
    return session is not None and session.processes.rank != 0
