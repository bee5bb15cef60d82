"""Patches: the callbacks. Every rank reads files, the first rank of each path writes.

Rank 0 alone sends and prints.
"""

import io
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from tempfile import TemporaryDirectory
from types import ModuleType
from typing import Any

import attrs
from keras import Model
from keras.callbacks import Callback, ProgbarLogger

from shardcore.binding import keras_private
from shardcore.binding.checkpoints.files import saving
from shardcore.binding.keras_private.patches import replaces, replaces_value
from shardcore.binding.ranks.collective_errors import raise_on_all_ranks
from shardcore.binding.ranks.session import Session, Sessions
from shardcore.binding.types import Original
from shardcore.domain.errors import CallProblem, OtherRankFailed, name_file
from shardcore.domain.scope import Scope

# The functions of `keras.src.utils.file_utils` by which callbacks change a file system.
WRITES = ("copy", "makedirs", "remove", "rmtree")

# Whether this rank writes the files of the callback that runs; None outside of one.
_writes_files = Scope[bool | None]("writes_files", default=None)


@replaces(
    "keras.src.callbacks.backup_and_restore:BackupAndRestore.on_train_end",
    "keras.src.callbacks.csv_logger:CSVLogger.on_train_begin",
    "keras.src.callbacks.csv_logger:CSVLogger.on_epoch_end",
    "keras.src.callbacks.model_checkpoint:ModelCheckpoint._save_model",
    "keras.src.callbacks.tensorboard:TensorBoard.set_model",
    "keras.src.callbacks.tensorboard:TensorBoard.on_train_begin",
    "keras.src.callbacks.tensorboard:TensorBoard.on_train_end",
    "keras.src.callbacks.tensorboard:TensorBoard.on_test_begin",
    "keras.src.callbacks.tensorboard:TensorBoard.on_test_end",
    "keras.src.callbacks.tensorboard:TensorBoard.on_epoch_end",
    reason="A full disk would be an error on one rank.",
)
def write_on_all_ranks(
    sessions: Sessions, original: Original, callback: Callback, *args: object, **kwargs: object
) -> None:
    """Replaces a method that writes a file: if one rank cannot, all ranks raise its error."""
    session, name = sessions.shared(), type(callback).__name__
    path = keras_private.path_of(callback)
    if session is None:
        original(callback, *args, **kwargs)
        return

    def work() -> None:
        failure = vars(callback).pop("_shardcore_failure", None)
        if failure is not None:
            raise failure
        try:
            original(callback, *args, **kwargs)
        except OSError as error:
            if path:
                name_file(error, path)
            raise

    what = f"write the file of {name}" + (f" {path!r}" if path else "")
    with _writing(callback, session):
        raise_on_all_ranks(work, what, session, is_same_code=True)


@replaces(
    "keras.src.callbacks.backup_and_restore:BackupAndRestore.on_train_begin",
    reason="Copies the backup before a damaged one on every rank; one does.",
)
def write_once_per_path(
    sessions: Sessions, original: Original, callback: Callback, *args: object, **kwargs: object
) -> None:
    """Replaces a method that reads files and may copy them: the first rank of each path does."""
    session = sessions.shared()
    if session is None:
        original(callback, *args, **kwargs)
        return
    with _writing(callback, session):
        original(callback, *args, **kwargs)


@contextmanager
def _writing(callback: Callback, session: Session) -> Iterator[None]:
    """Opens a context in which the first rank of each path writes files. A collective."""
    path = keras_private.path_of_files(callback)
    is_writer = (
        session.processes.rank == 0
        if path is None
        else saving.is_first_writer(saving.canonical_path(path), session)
    )
    vars(callback)["_shardcore_is_writer"] = is_writer
    with _writes_files(is_writer):
        yield


@replaces(
    "keras.src.callbacks.tensorboard:TensorBoard.on_train_batch_begin",
    "keras.src.callbacks.tensorboard:TensorBoard.on_train_batch_end",
    reason="A full disk would be an error on one rank.",
)
def defer_write_error(
    sessions: Sessions, original: Original, callback: Callback, *args: object, **kwargs: object
) -> None:
    """Replaces a method that writes at each step: the next `write_on_all_ranks` raises its error.

    So the ranks do not exchange errors at each step.
    """
    session = sessions.shared()
    try:
        original(callback, *args, **kwargs)
    except OtherRankFailed:
        raise
    except Exception as error:
        if session is None:
            raise
        vars(callback).setdefault("_shardcore_failure", error)


@replaces_value(
    "keras.src.callbacks.csv_logger:file_utils",
    "keras.src.callbacks.model_checkpoint:file_utils",
    "keras.src.callbacks.tensorboard:file_utils",
    reason="Every rank would write the callback's files; one does.",
)
def files_of_one_writer(sessions: Sessions, original: ModuleType) -> "OneWriter":
    """Replaces the module `file_utils` in the callbacks that write files."""
    return OneWriter(sessions, original)


@replaces_value(
    "keras.src.callbacks.backup_and_restore:file_utils",
    reason="Every rank would write the callback's files; one does.",
)
def renamed_files_of_one_writer(sessions: Sessions, original: ModuleType) -> "OneWriter":
    """Replaces it in `BackupAndRestore`, which writes each file under another name first."""
    return OneWriter(sessions, original, is_renamed=True)


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
        return lambda *args: function(*args) if _is_writer(self.sessions) else None

    def File(self, path: str, mode: str = "r") -> Any:  # noqa: N802 - Keras' name
        """Opens a file; what another rank than the first writes is discarded."""
        if _is_writer(self.sessions) or not set(mode) & set("wax+"):
            is_renamed = self.is_renamed and mode == "w" and not keras_private.is_remote(path)
            if is_renamed and self.sessions.are_served():
                return saving.atomically_written(path)
            return self.file_utils.File(path, mode)
        if "r" not in mode:
            return open(os.devnull, mode)
        with self.file_utils.File(path, mode.replace("+", "")) as file:  # read, then written
            content = file.read()
        return io.BytesIO(content) if isinstance(content, bytes) else io.StringIO(content)


@replaces_value(
    "keras.src.callbacks.tensorboard:TensorBoard.summary",
    reason="Every rank would write into one folder; one does.",
)
def one_summary(sessions: Sessions, original: property) -> property:
    """Replaces `TensorBoard.summary`, TensorFlow's module: one rank of a path keeps its files."""

    def summary(callback: Callback) -> Any:
        module = original.__get__(callback)
        is_writer = vars(callback).get("_shardcore_is_writer", not _is_other_rank(sessions))
        return module if is_writer else _DiscardedSummary(module)

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
        """Opens a writer to a temporary folder instead of `logdir`."""
        folder = TemporaryDirectory(prefix="shardcore-discarded-")
        writer = self.module.create_file_writer(folder.name)
        writer._shardcore_folder = folder
        return writer


@replaces(
    "keras.src.callbacks.remote_monitor:RemoteMonitor.on_epoch_end",
    reason="Every rank would send; one does.",
)
def send_once(sessions: Sessions, original: Original, *args: object, **logs: object) -> None:
    """Replaces `RemoteMonitor.on_epoch_end`: rank 0 sends; all ranks raise if none can."""
    if not (keras_private.can_send() and _is_other_rank(sessions)):
        original(*args, **logs)


@replaces(
    "keras.src.callbacks.orbax_checkpoint:OrbaxCheckpoint.set_model",
    reason="Orbax takes the full values of all variables at once, on each rank.",
)
def refuse_orbax(session: Session, original: Original, callback: Callback, model: Model) -> None:
    """Replaces `OrbaxCheckpoint.set_model`: a rank would hold the full values of all variables."""
    if session.mesh.size > 1:
        raise CallProblem(
            f"OrbaxCheckpoint would write the full values of all variables from each of "
            f"{session.mesh.size} ranks: Keras knows how to share them on JAX only. Use "
            "shardcore.ShardedCheckpoint, or ModelCheckpoint, whose file one rank writes."
        )
    original(callback, model)


@replaces(
    "keras.src.utils.io_utils:print_msg",
    reason="One rank prints.",
    everywhere=True,
)
def print_once(sessions: Sessions, original: Original, *args: object, **line: object) -> None:
    """Replaces `print_msg`: rank 0 prints."""
    if not _is_other_rank(sessions):
        original(*args, **line)


@replaces(
    "keras.src.utils.summary_utils:print_summary",
    reason="One rank prints.",
    everywhere=True,
)
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


@replaces(
    "keras.src.callbacks.progbar_logger:ProgbarLogger.set_params",
    reason="One rank shows progress.",
)
def show_once(
    sessions: Sessions, original: Original, bar: ProgbarLogger, params: dict[str, object]
) -> None:
    """Replaces `ProgbarLogger.set_params`: rank 0 shows progress."""
    original(bar, params)
    if _is_other_rank(sessions):
        bar.verbose = 0


def _is_writer(sessions: Sessions) -> bool:
    is_writer = _writes_files.now()
    return not _is_other_rank(sessions) if is_writer is None else is_writer


def _is_other_rank(sessions: Sessions) -> bool:
    session = sessions.current()
    return session is not None and session.processes.rank != 0
