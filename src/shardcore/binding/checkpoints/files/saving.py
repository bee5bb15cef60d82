"""Patches: files. One rank writes; all ranks all-gather one variable at a time (ADR 11)."""

import io
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import h5py
import torch
from keras import Model, Variable

from shardcore.binding import keras_private
from shardcore.binding.checkpoints.files.atomic import write_file
from shardcore.binding.engine import torch_state
from shardcore.binding.keras_private.patches import replaces
from shardcore.binding.keras_private.variables import set_tensor, tensor_of
from shardcore.binding.ranks.collective_errors import (
    do_all_ranks_run_this,
    raise_on_all_ranks,
    raise_on_calling_ranks,
)
from shardcore.binding.ranks.rank_consistency import variables_of
from shardcore.binding.ranks.session import Session, Sessions, stored_layout
from shardcore.binding.types import FilePath, Original

# Formats of one file, which can be renamed when it is complete.
_ONE_FILE = ("litert", "onnx", "torch")


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
    if is_alone or not is_file or sessions.collective_work is not None:
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

    def save() -> None:
        write_file(path, lambda unfinished: Path(unfinished).write_bytes(content))

    raise_on_calling_ranks(save, f"save {canonical_path(path)!r}", sessions)


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
            write_file(path, lambda unfinished: _write_with_attributes(unfinished, write, sessions))
        else:
            write(path)

    if is_alone:
        save()
        return
    what = f"save {canonical_path(path)!r}"
    is_sharded = any(map(_is_sharded, variables_of(model)))
    if session is None or not (is_sharded or do_all_ranks_run_this(sessions)):
        raise_on_calling_ranks(save, what, sessions)
        return
    session.processes.barrier("saving a model")
    is_writer = is_first_writer(canonical_path(path), session)

    def work() -> None:
        save() if is_writer else attend()

    raise_on_all_ranks(work, what, session, sessions)


def _write_with_attributes(path: str, write: Callable[..., None], sessions: Sessions) -> None:
    """Writes a file of weights, with the state that a callback saves in it."""
    write(path)
    if sessions.weights_file_attributes:
        # By default an attribute has at most 64 KiB.
        with h5py.File(path, "r+", libver="latest") as file:
            file.attrs.update(sessions.weights_file_attributes)


def canonical_path(path: str) -> str:
    """Returns a path that is the same for one file in any folder of work, also by a link."""
    return path if keras_private.is_remote(path) else os.path.realpath(path)


def is_first_writer(path: str, session: Session) -> bool:
    """Returns whether this rank is the first that writes to `path`. A collective."""
    return session.processes.gather(path).index(path) == session.processes.rank


def _is_sharded(variable: Variable) -> bool:
    layout = stored_layout(variable)
    return layout is not None and not layout.is_replicated


@replaces(
    "keras.src.models.model:Model.export",
    reason="One rank exports full values; all ranks all-gather the shards.",
)
def export(
    sessions: Sessions,
    original: Original,
    model: Model,
    filepath: FilePath,
    format: str = "tf_saved_model",
    verbose: bool | None = None,
    **options: object,
) -> None:
    """Replaces `Model.export`, called on every rank: one of each path writes, from a full model."""
    write = partial(original, model, format=format, verbose=verbose, **options)
    session = sharding_session(model, sessions)
    if session is None:
        write(filepath)
        return
    path = str(filepath)

    def work() -> None:
        if not is_writer:
            return
        if format not in _ONE_FILE or keras_private.is_remote(path):
            write(path)
            return
        write_file(path, lambda unfinished: write(unfinished, verbose=False))
        if verbose is None or verbose:
            keras_private.print_message(f"Saved the exported model at '{path}'.")

    session.processes.barrier("exporting a model")
    is_writer = is_first_writer(canonical_path(path), session)
    with _unsharded(model, session, is_writer):
        raise_on_all_ranks(work, f"export {path!r}", session, sessions)


def sharding_session(model: Model, sessions: Sessions) -> Session | None:
    """Returns the session in which `model` is sharded, None if it is replicated."""
    session = sessions.current() or sessions.session_of_model(model)
    return None if session is None or session.mesh.size == 1 else session


@contextmanager
def _unsharded(model: Model, session: Session, is_full: bool) -> Iterator[None]:
    """Opens a context in which ranks that ask have the full `model`, unsharded. A collective."""
    sharded: list[tuple[Variable, torch.Tensor]] = []
    for variable in model.variables:
        value = session.strategy.full_tensor(tensor_of(variable))
        if is_full:
            sharded.append((variable, tensor_of(variable)))
            plain = torch.nn.Parameter(value, requires_grad=tensor_of(variable).requires_grad)
            set_tensor(variable, plain)
    swapped = [(value, tensor_of(variable)) for variable, value in sharded]
    try:
        with torch_state.holding(model, swapped), keras_private.without_distribution():
            yield
    finally:
        for variable, value in sharded:
            set_tensor(variable, value)
