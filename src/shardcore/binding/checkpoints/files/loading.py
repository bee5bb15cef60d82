"""Patches: reading files. A rank holds one full variable at a time, and no whole file."""

import io
import zipfile
from types import ModuleType, SimpleNamespace
from typing import Any, BinaryIO

import numpy
import torch
from keras import Model, Variable

from shardcore.binding.engine.large_values import PIECE
from shardcore.binding.engine.variable import strategy_of
from shardcore.binding.keras_private.patches import replaces, replaces_value
from shardcore.binding.ranks.session import Session, Sessions
from shardcore.binding.types import Original
from shardcore.domain.errors import CallProblem

# Bytes before the name of a file; the last four are the lengths of the name and of the next field.
_LOCAL_HEADER = 30
_ENCRYPTED = 1  # a bit of the flags


@replaces(
    "keras.src.saving.saving_lib:is_memory_sufficient",
    reason="Reads and writes a whole archive in memory.",
)
def is_memory_sufficient(session: Session, original: Original, model: Model) -> bool:
    """Replaces `is_memory_sufficient`: a file of all ranks' shards is too large for one of them."""
    return session.mesh.size == 1 and bool(original(model))


@replaces(
    "keras.src.backend.torch.core:Variable._convert_to_tensor",
    reason="Copies an array that is copied into the variable.",
)
def without_copy(
    sessions: Sessions, original: Original, variable: Variable, value: object, dtype: object = None
) -> torch.Tensor:
    """Replaces `Variable._convert_to_tensor`: an array to assign to a shard is not copied first."""
    strategy = strategy_of(variable, sessions)
    if strategy is not None and isinstance(value, numpy.ndarray) and _can_be_shared(value):
        is_bfloat16 = value.dtype.name == "bfloat16"
        shared = torch.from_numpy(value.view("int16") if is_bfloat16 else value)
        value = shared.view(torch.bfloat16) if is_bfloat16 else shared
    tensor: torch.Tensor = original(variable, value, dtype)
    return tensor


def _can_be_shared(array: numpy.ndarray) -> bool:
    """Tells whether torch has the dtype of a large `array`, and may write into its memory."""
    is_known = array.dtype.kind in "fib" or array.dtype.name in ("uint8", "bfloat16")
    is_native = array.dtype.isnative and array.dtype.itemsize <= 8
    is_open = array.flags.writeable and array.flags.c_contiguous
    return array.size > PIECE and is_known and is_native and is_open


@replaces_value(
    "keras.src.saving.saving_lib:zipfile",
    reason=("Reads an archive from its beginning at each step back, or extracts it on each rank."),
)
def archives(sessions: Sessions, original: ModuleType) -> SimpleNamespace:
    """Replaces the module `zipfile` in `saving_lib`: a file in an archive is read in place."""

    class Archive(zipfile.ZipFile):
        def open(self, name: Any, mode: Any = "r", *args: Any, **kwargs: Any) -> Any:
            opened = super().open(name, mode, *args, **kwargs)  # which checks its header
            if mode != "r" or self.fp is None:
                return opened
            info = name if isinstance(name, zipfile.ZipInfo) else self.getinfo(name)
            if info.compress_type != zipfile.ZIP_STORED or info.flag_bits & _ENCRYPTED:
                return opened
            opened.close()
            return io.BufferedReader(_Stored.of(self.fp, info))

        def extract(self, *args: Any, **kwargs: Any) -> str:
            if sessions.shared() is not None:
                # Keras then reads the file within the archive.
                raise CallProblem("Each rank would write a copy of the file.")
            return super().extract(*args, **kwargs)

    return SimpleNamespace(**{**vars(original), "ZipFile": Archive})


class _Stored(io.RawIOBase):
    """A file that an archive stores without compression. It is read while nothing else is."""

    def __init__(self, archive: BinaryIO, start: int, size: int) -> None:
        super().__init__()
        self._archive, self._start, self._size, self._at = archive, start, size, 0

    @classmethod
    def of(cls, archive: Any, info: zipfile.ZipInfo) -> "_Stored":
        """Finds the content of the file `info`, behind its local header, in an open `archive`."""
        archive.seek(info.header_offset + _LOCAL_HEADER - 4)
        lengths = archive.read(4)
        name, extra = (int.from_bytes(length, "little") for length in (lengths[:2], lengths[2:]))
        return cls(archive, info.header_offset + _LOCAL_HEADER + name + extra, info.file_size)

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._size}[whence]
        self._at = max(base + offset, 0)
        return self._at

    def readinto(self, buffer: Any) -> int:
        self._archive.seek(self._start + self._at)
        count = max(min(len(buffer), self._size - self._at), 0)
        read: int = self._archive.readinto(memoryview(buffer)[:count])  # type: ignore[attr-defined]
        self._at += read
        return read
