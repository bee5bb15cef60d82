"""Patches of keras-hub: one rank writes a model that is exported for Transformers.

keras-hub reads the full value of each variable and writes it into a file that it opens itself. So
all ranks run it; the files of all but one are the null device.
"""

import os
from collections.abc import Callable
from functools import partial
from typing import IO, Any

import attrs
from keras import Model

from shardcore.binding import keras_private
from shardcore.binding.checkpoints.files.saving import (
    canonical_path,
    is_first_writer,
    sharding_session,
)
from shardcore.binding.ranks.collective_errors import (
    check_other_ranks,
    raise_on_all_ranks,
    raise_on_calling_ranks,
)
from shardcore.binding.ranks.session import Sessions
from shardcore.binding.types import FilePath, Original


@attrs.define(eq=False)
class TransformersExport:
    """The functions of keras-hub's exporter that shardcore replaces.

    Attributes:
        writes: Whether this rank writes the files of the export that runs; None if none runs.
    """

    sessions: Sessions
    writes: bool | None = attrs.field(default=None, init=False)

    def replacements(self) -> dict[str, Callable[[Any], Any]]:
        """Returns, by name, functions from old to new values."""
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
        """Exports a model, or its backbone."""
        session = sharding_session(model, self.sessions)
        if session is None or self.sessions.collective_work is not None:
            original(model, path, *args, **kwargs)
            return
        what = f"export {canonical_path(str(path))!r}"
        session.processes.barrier("exporting a model for Transformers")
        self.writes = is_first_writer(canonical_path(str(path)), session)
        try:
            work = partial(original, model, path, *args, **kwargs)
            raise_on_all_ranks(work, what, session, self.sessions)
        finally:
            self.writes = None

    def _tokenizer(self, original: Original, tokenizer: object, path: FilePath) -> None:
        """Exports a tokenizer, which is the same on all ranks."""
        if self.writes is None and self.sessions.processes.world_size > 1:
            work = partial(original, tokenizer, path)
            raise_on_calling_ranks(work, f"export {canonical_path(str(path))!r}", self.sessions)
        elif self.writes is not False:
            original(tokenizer, path)

    def _open(self, original: Original, file: FilePath, mode: str = "r", **options: object) -> Any:
        """Opens a file; ranks ask if one has failed, before they all-gather variables."""
        opened = original(os.devnull if self.writes is False else file, mode, **options)
        if self.writes is None or "b" not in mode:
            return opened
        check_other_ranks(self.sessions)
        return _Checked(opened, self.sessions)


@attrs.frozen(eq=False)
class _Checked:
    """A file whose writer asks, after each piece, whether another rank has failed."""

    file: IO[bytes]
    sessions: Sessions

    def write(self, content: bytes) -> int:
        """Writes a piece, which each rank does."""
        written = self.file.write(content)
        check_other_ranks(self.sessions)
        return written

    def __enter__(self) -> "_Checked":
        return self

    def __exit__(self, *_: object) -> None:
        self.file.close()
