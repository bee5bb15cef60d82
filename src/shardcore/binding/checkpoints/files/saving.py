"""Patches: files. One rank writes; all ranks all-gather one variable at a time (ADR 11).

A reader, or a crash, finds the old file or the new one, complete: see `write_file`.
"""

import io
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, TextIO

import h5py
from keras import Model, Variable

from shardcore.binding import keras_private
from shardcore.binding.keras_private.patches import replaces
from shardcore.binding.ranks import collective_errors
from shardcore.binding.ranks.rank_consistency import variables_of
from shardcore.binding.ranks.session import Session, Sessions
from shardcore.binding.types import FilePath, Original
from shardcore.domain.errors import name_file
from shardcore.domain.scope import Scope

# The attributes of the file of weights that a callback saves; None outside of one.
weights_file_attributes = Scope[Mapping[str, str] | None]("weights_file_attributes", default=None)


@replaces(
    "keras.src.saving.saving_lib:save_model",
    reason="Every rank would write the file; one does, all ranks all-gather the shards.",
)
def save_model(
    sessions: Sessions,
    original: Original,
    model: Model,
    filepath: FilePath,
    zipped: bool = True,
    **options: object,
) -> None:
    """Replaces `saving_lib.save_model`, called on every rank."""
    write = partial(original, model, zipped=zipped, **options)
    _save(sessions, model, filepath, write, partial(keras_private.gather_model, model), zipped)


@replaces(
    "keras.src.saving.saving_lib:save_weights_only",
    reason="As for the whole model.",
)
def save_weights(
    sessions: Sessions,
    original: Original,
    model: Model,
    filepath: FilePath,
    max_shard_size: float | None = None,
    objects_to_skip: Iterable[object] | None = None,
) -> None:
    """Replaces `saving_lib.save_weights_only`, called on every rank."""
    write = partial(original, model, max_shard_size=max_shard_size, objects_to_skip=objects_to_skip)
    attend = partial(keras_private.gather_state, model, objects_to_skip)
    _save(sessions, model, filepath, write, attend, one_file=max_shard_size is None)


@replaces(
    "keras.src.legacy.saving.legacy_h5_format:save_model_to_hdf5",
    reason='As for the whole model: save("model.h5") opened one file on every rank.',
)
def save_legacy(
    sessions: Sessions,
    original: Original,
    model: Model,
    filepath: FilePath | h5py.File,
    overwrite: bool = True,
    include_optimizer: bool = True,
) -> None:
    """Replaces `save_model_to_hdf5`, called on every rank for a path that ends in .h5."""

    def write(target: FilePath | h5py.File) -> None:
        original(model, target, overwrite, include_optimizer)

    if isinstance(filepath, h5py.File):  # each rank has opened its own
        write(filepath)
        return
    attend = partial(keras_private.gather_legacy, model, include_optimizer)
    _save(sessions, model, filepath, write, attend, one_file=True, makes_folder=True)


@replaces(
    "keras.src.saving.saving_lib:H5IOStore.__init__",
    reason="Every rank would write the file of LoRA weights; one does.",
)
def open_store(
    sessions: Sessions,
    original: Original,
    store: Any,
    path_or_io: FilePath,
    archive: object = None,
    mode: str = "r",
) -> None:
    """Replaces `H5IOStore.__init__`: of several ranks, each writes into its memory at first.

    `save_lora_weights` of keras-hub opens a file so.
    """
    is_file = isinstance(path_or_io, str | os.PathLike) and archive is None and mode == "w"
    is_alone = sessions.processes.world_size == 1
    if is_alone or not is_file or collective_errors.is_in_collective_work():
        original(store, path_or_io, archive=archive, mode=mode)
        return
    original(store, io.BytesIO(), mode=mode)
    store._shardcore_path = str(path_or_io)


@replaces(
    "keras.src.saving.saving_lib:H5IOStore.close",
    reason="One rank writes what it holds.",
)
def close_store(sessions: Sessions, original: Original, store: Any) -> None:
    """Replaces `H5IOStore.close`: one of the ranks that close a file writes it."""
    original(store)
    path = vars(store).pop("_shardcore_path", None)
    if path is None:
        return
    content = store.path_or_io.getbuffer()
    save = partial(write_file, path, lambda unfinished: Path(unfinished).write_bytes(content))
    what = f"save {canonical_path(path)!r}"
    collective_errors.raise_on_calling_ranks(save, what, sessions.processes)


@replaces(
    "keras.src.utils.io_utils:ask_to_proceed_with_overwrite",
    reason="One rank asks, and all use its answer.",
)
def ask_on_rank_0(
    session: Session, original: Callable[..., bool], filepath: str | os.PathLike[str]
) -> bool:
    """Replaces `ask_to_proceed_with_overwrite`: rank 0 asks, its answer counts on all ranks."""
    session.processes.barrier(f"the question whether to overwrite {filepath}")
    answer = original(filepath) if session.processes.rank == 0 else None
    return bool(session.processes.gather(answer)[0])


def _save(
    sessions: Sessions,
    model: Model,
    filepath: FilePath,
    write: Callable[..., None],
    attend: Callable[[], None],
    one_file: bool,
    makes_folder: bool = False,
) -> None:
    """Writes each file on one rank while the others attend; returns when all exist, or fails.

    One rank alone may save a model of which every rank has all values, and one that it made
    after `clear_session()`. Each rank writes into its own buffer.
    """
    session, path = sharding_session(model, sessions), str(filepath)
    is_alone = session is None and sessions.processes.world_size == 1
    is_own = is_alone and not sessions.are_served()
    if is_own or isinstance(filepath, io.IOBase):
        write(filepath)
        return

    def save() -> None:
        if makes_folder:
            os.makedirs(os.path.dirname(path) or os.curdir, exist_ok=True)
        if one_file and not keras_private.is_remote(path):
            write_file(path, lambda unfinished: _write_with_attributes(unfinished, write))
        else:
            write(path)

    if is_alone:
        save()
        return
    what = f"save {canonical_path(path)!r}"
    is_sharded = any(map(_is_sharded, variables_of(model)))
    if session is None or not (is_sharded or collective_errors.do_all_ranks_run_this()):
        collective_errors.raise_on_calling_ranks(save, what, sessions.processes)
        return
    session.processes.barrier("saving a model")
    is_writer = is_first_writer(canonical_path(path), session)
    collective_errors.raise_on_all_ranks(save if is_writer else attend, what, session)


def _write_with_attributes(path: str, write: Callable[..., None]) -> None:
    """Writes a file of weights, with the state that a callback saves in it."""
    write(path)
    attributes = weights_file_attributes.now()
    if attributes is not None:
        # By default an attribute has at most 64 KiB.
        with h5py.File(path, "r+", libver="latest") as file:
            file.attrs.update(attributes)


def canonical_path(path: str) -> str:
    """Resolves folders of work and links, so that one file has one path on all ranks."""
    return path if keras_private.is_remote(path) else os.path.realpath(path)


def is_first_writer(path: str, session: Session) -> bool:
    """Tells whether this rank is the first of those that write to `path`. A collective."""
    return session.processes.gather(path).index(path) == session.processes.rank


def _is_sharded(variable: Variable) -> bool:
    layout = keras_private.storage_of(variable).layout
    return layout is not None and not layout.is_replicated


def sharding_session(model: Model, sessions: Sessions) -> Session | None:
    """Finds the session in which `model` may be sharded, None if this rank has all values."""
    session = sessions.current() or sessions.session_of_model(model)
    return None if session is None or session.mesh.size == 1 else session


def write_file(path: str, write: Callable[[str], object]) -> None:
    """Writes a file into a new folder beside `path`, and renames it when it is on disk.

    The folder of a writer that was killed is removed first. Errors name `path`.

    Args:
        path: The file. A link to a file stays a link.
        write: Called with the path of the unfinished file, whose name is that of the file.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     path = f"{folder}/a.txt"
        ...     write_file(path, lambda unfinished: Path(unfinished).write_text("complete"))
        ...     Path(path).read_text(), os.listdir(folder)
        ('complete', ['a.txt'])
    """
    target = Path(os.path.realpath(path))
    folder = target.with_name(f".unfinished-{target.name}")
    unfinished = folder / target.name  # the ending stays: it selects the format
    try:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        write(str(unfinished))
        _flush(unfinished)
        os.replace(unfinished, target)
        _flush(target.parent)
    except Exception as error:
        _rename_in(error, path, (str(unfinished), str(folder)))
        raise
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def atomically_written(path: str) -> Iterator[TextIO]:
    """Opens a text file that gets its name when it is closed and complete.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     with atomically_written(f"{folder}/a.json") as file:
        ...         _ = file.write("{}")
        ...     os.listdir(folder)
        ['a.json']
    """
    parts: list[str] = []

    class _Text:
        write = staticmethod(parts.append)

    yield _Text()  # type: ignore[misc]
    write_file(path, lambda unfinished: Path(unfinished).write_text("".join(parts)))


def _flush(path: Path) -> None:
    """Waits until a file, or the names in a folder, are on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _rename_in(error: Exception, path: str, others: tuple[str, ...]) -> None:
    """Replaces the `others` in the message of `error` by `path`."""

    def renamed(value: object) -> object:
        for other in others:
            value = value.replace(other, path) if isinstance(value, str) else value
        return value

    error.args = tuple(map(renamed, error.args))
    if isinstance(error, OSError):
        name_file(error, path)
        # None would be shown, as if it were the name.
        if error.filename is not None:
            error.filename = renamed(error.filename)
        if error.filename2 is not None:
            del error.filename2
