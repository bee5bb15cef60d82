"""Patches: the callbacks. Every rank reads files; rank 0 alone writes, sends and prints."""

import io
import os
from collections.abc import Callable
from tempfile import TemporaryDirectory
from typing import Any

import attrs
from keras import Model
from keras.callbacks import Callback, ProgbarLogger

from shardcore.binding import keras_private
from shardcore.binding.context.collective_errors import raise_on_all_ranks
from shardcore.binding.context.session import Session, Sessions
from shardcore.binding.files.atomic import atomically_written
from shardcore.binding.types import Original
from shardcore.domain.errors import StrategyError

# The functions of `keras.src.utils.file_utils` by which callbacks change a file system.
WRITES = ("copy", "makedirs", "remove", "rmtree")


def together(
    sessions: Sessions, original: Original, callback: Callback, *args: object, **kwargs: object
) -> None:
    """Replaces a method that writes a file: if one rank cannot, all ranks raise its error."""
    session, name = sessions.current(), type(callback).__name__
    if session is None or session.mesh.size == 1:
        original(callback, *args, **kwargs)
        return

    def work() -> None:
        failure = vars(callback).pop("_shardcore_failure", None)
        if failure is not None:
            raise failure
        original(callback, *args, **kwargs)

    raise_on_all_ranks(work, f"write the file of {name}", session, sessions)


def raised_later(
    sessions: Sessions, original: Original, callback: Callback, *args: object, **kwargs: object
) -> None:
    """Replaces a method that writes at each step: the next one of `together` raises its error.

    So the ranks do not exchange errors at each step.
    """
    session = sessions.current()
    try:
        original(callback, *args, **kwargs)
    except Exception as error:
        if session is None or session.mesh.size == 1:
            raise
        vars(callback).setdefault("_shardcore_failure", error)


@attrs.frozen
class OneWriter:
    """Replaces the module `file_utils` in the callbacks that write files."""

    sessions: Sessions
    file_utils: Any
    is_renamed: bool = False  # whether a file is written under another name, and renamed

    def __getattr__(self, name: str) -> Any:
        function = getattr(self.file_utils, name)
        if name not in WRITES:
            return function
        return lambda *args: None if _is_other_rank(self.sessions) else function(*args)

    def File(self, path: str, mode: str = "r") -> Any:  # noqa: N802 - Keras' name
        """Returns an open file; the writes of other ranks than 0 are discarded."""
        if not _is_other_rank(self.sessions) or not set(mode) & set("wax+"):
            is_renamed = self.is_renamed and mode == "w" and not keras_private.is_remote(path)
            if is_renamed and self.sessions.are_served():
                return atomically_written(path)
            return self.file_utils.File(path, mode)
        if "r" not in mode:
            return open(os.devnull, mode)
        with self.file_utils.File(path, mode.replace("+", "")) as there:  # read, then written
            content = there.read()
        return io.BytesIO(content) if isinstance(content, bytes) else io.StringIO(content)


def one_summary(sessions: Sessions, original: property) -> property:
    """Replaces `TensorBoard.summary`, TensorFlow's module: only rank 0 keeps its files."""

    def summary(callback: Callback) -> Any:
        module = original.__get__(callback)
        return _DiscardedSummary(module) if _is_other_rank(sessions) else module

    return property(summary)


@attrs.frozen
class _DiscardedSummary:
    """A replacement of the module `tensorflow.summary` that deletes its files with their writer.

    A writer that writes nothing would read nothing either, and rank 0 would be alone in
    gathering the weights of a histogram.
    """

    module: Any

    def __getattr__(self, name: str) -> Any:
        return getattr(self.module, name)

    def create_file_writer(self, logdir: str) -> Any:
        """Returns a writer to a temporary folder instead of `logdir`."""
        folder = TemporaryDirectory(prefix="shardcore-discarded-")
        writer = self.module.create_file_writer(folder.name)
        writer._shardcore_folder = folder
        return writer


def send_once(sessions: Sessions, original: Original, *args: object, **logs: object) -> None:
    """Replaces `RemoteMonitor.on_epoch_end`: rank 0 sends; all ranks raise if none can."""
    if not (keras_private.can_send() and _is_other_rank(sessions)):
        original(*args, **logs)


def refuse_orbax(session: Session, original: Original, callback: Callback, model: Model) -> None:
    """Replaces `OrbaxCheckpoint.set_model`: all ranks would write full values into one folder."""
    if session.mesh.size > 1:
        raise StrategyError(
            f"OrbaxCheckpoint would write the same folder from each of {session.mesh.size} "
            "ranks: Keras knows how to share it on JAX only. Use ModelCheckpoint, whose file "
            "one rank writes."
        )
    original(callback, model)


def print_once(sessions: Sessions, original: Original, *args: object, **line: object) -> None:
    """Replaces `print_msg`: rank 0 prints."""
    if not _is_other_rank(sessions):
        original(*args, **line)


def summarize_once(
    sessions: Sessions,
    original: Original,
    model: object,
    line_length: int | None = None,
    positions: object = None,
    print_fn: Callable[[str], object] | None = None,
    **options: object,
) -> None:
    """Replaces `print_summary`: rank 0 prints; a `print_fn` gets the text on each rank."""
    if print_fn is not None or not _is_other_rank(sessions):
        original(model, line_length, positions, print_fn, **options)


def show_once(
    sessions: Sessions, original: Original, bar: ProgbarLogger, params: dict[str, object]
) -> None:
    """Replaces `ProgbarLogger.set_params`: rank 0 shows progress."""
    original(bar, params)
    if _is_other_rank(sessions):
        bar.verbose = 0


def _is_other_rank(sessions: Sessions) -> bool:
    session = sessions.current()
    return session is not None and session.processes.rank != 0
