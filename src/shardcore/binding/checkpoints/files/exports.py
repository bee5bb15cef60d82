"""Patches: exports of models, by Keras, and by keras-hub for Transformers (ADR 45).

keras-hub reads the full value of each variable and writes it into a file that it opens itself. So
all ranks run it; the files of all but one are the null device.
"""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import IO, Any

import attrs
import torch
from keras import Model, Variable

from shardcore.binding import keras_private
from shardcore.binding.checkpoints.files import saving
from shardcore.binding.engine import torch_state
from shardcore.binding.keras_private.patches import replaces
from shardcore.binding.keras_private.variables import set_tensor, tensor_of
from shardcore.binding.ranks import collective_errors
from shardcore.binding.ranks.session import Session, Sessions
from shardcore.binding.types import FilePath, Original
from shardcore.domain.scope import Scope

# Formats of one file, which can be renamed when it is complete.
_ONE_FILE = ("litert", "onnx", "torch")


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
    session = saving.sharding_session(model, sessions)
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
        saving.write_file(path, lambda unfinished: write(unfinished, verbose=False))
        if verbose is None or verbose:
            keras_private.print_message(f"Saved the exported model at '{path}'.")

    session.processes.barrier("exporting a model")
    is_writer = saving.is_first_writer(saving.canonical_path(path), session)
    with _unsharded(model, session, is_writer):
        collective_errors.raise_on_all_ranks(work, f"export {path!r}", session)


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


# Whether this rank writes the files of the export for Transformers that runs; None if none runs.
_writes_export = Scope[bool | None]("writes_export", default=None)


@attrs.frozen(eq=False)
class TransformersExport:
    """The functions of keras-hub's exporter that shardcore replaces."""

    sessions: Sessions

    def replacements(self) -> dict[str, Callable[[Any], Any]]:
        """Wraps functions of keras-hub, by name: each takes the old one, and gives the new one."""
        functions: dict[str, Callable[..., Any]] = {
            "export_backbone": self._export,
            "export_to_safetensors": self._export,
            "export_tokenizer": self._tokenizer,
            "open": self._open,
        }
        return {name: keras_private.wrap_calls(function) for name, function in functions.items()}

    def _export(
        self, original: Original, model: Model, path: FilePath, *args: object, **kwargs: object
    ) -> None:
        session = saving.sharding_session(model, self.sessions)
        if session is None or collective_errors.is_in_collective_work():
            original(model, path, *args, **kwargs)
            return
        canonical = saving.canonical_path(str(path))
        session.processes.barrier("exporting a model for Transformers")
        work = partial(original, model, path, *args, **kwargs)
        with _writes_export(saving.is_first_writer(canonical, session)):
            collective_errors.raise_on_all_ranks(work, f"export {canonical!r}", session)

    def _tokenizer(self, original: Original, tokenizer: object, path: FilePath) -> None:
        """Exports a tokenizer, which is the same on all ranks."""
        writes, processes = _writes_export.now(), self.sessions.processes
        if writes is None and processes.world_size > 1:
            work = partial(original, tokenizer, path)
            what = f"export {saving.canonical_path(str(path))!r}"
            collective_errors.raise_on_calling_ranks(work, what, processes)
        elif writes is not False:
            original(tokenizer, path)

    def _open(self, original: Original, file: FilePath, mode: str = "r", **options: object) -> Any:
        """Opens a file; ranks ask if one has failed, before they all-gather variables."""
        writes = _writes_export.now()
        opened = original(os.devnull if writes is False else file, mode, **options)
        if writes is None or "b" not in mode:
            return opened
        collective_errors.check_other_ranks()
        return _Checked(opened)


@attrs.frozen(eq=False)
class _Checked:
    """A file whose writer asks, after each piece, whether another rank has failed."""

    file: IO[bytes]

    def write(self, content: bytes) -> int:
        written = self.file.write(content)
        collective_errors.check_other_ranks()
        return written

    def __enter__(self) -> "_Checked":
        return self

    def __exit__(self, *_: object) -> None:
        self.file.close()
