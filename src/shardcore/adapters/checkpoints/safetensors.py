"""Files of the format safetensors (ADR 31): written piece by piece, read slice by slice.

The package `safetensors` writes a whole file from memory, and maps a whole file to read a slice.
Its tests read what this module writes, and the reverse.
"""

import hashlib
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import attrs

from shardcore.adapters.checkpoints import folders
from shardcore.domain.checkpoints import file_format
from shardcore.domain.checkpoints.file_format import DTYPES, PREFIX, Entry, entries_of
from shardcore.domain.checkpoints.grid import Box, consecutive_runs
from shardcore.domain.checkpoints.index import StoredFile
from shardcore.domain.errors import CheckpointError, name_file

_READ_AT_ONCE = 2**22  # bytes
_SHOWN = 200  # characters of an error


def write(path: Path, header: bytes, contents: Iterable[memoryview]) -> StoredFile:
    """Writes a file of `contents` in the order of its header, down to the disk.

    Returns:
        Its name, size and checksum.
    """
    checksum, size = hashlib.sha256(), 0
    try:
        with path.open("xb") as file:
            for part in (memoryview(header), *contents):
                file.write(part)
                checksum.update(part)
                size += part.nbytes
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        name_file(error, str(path))
        raise
    return StoredFile(path.name, size, checksum.hexdigest())


@attrs.frozen
class SafetensorsFile:
    """An open file; reads slices of its tensors.

    Args:
        path: Its path.
        entries: Its tensors by key.
    """

    path: Path
    entries: Mapping[str, Entry]
    _descriptor: int

    def entry(self, key: str, dtype: str, shape: tuple[int, ...]) -> Entry:
        """Looks up the tensor `key`, which has this dtype and shape.

        Raises:
            CheckpointError: If it is missing, or has another dtype or shape.
        """
        entry = self.entries.get(key)
        if entry is None or (entry.dtype, entry.shape) != (dtype, shape):
            other = "nothing" if entry is None else f"{entry.dtype} of shape {entry.shape}"
            raise CheckpointError(
                f"File {str(self.path)!r} should have {key!r}, {dtype} of shape {shape}, but has "
                f"{other}: the checkpoint is damaged, use another one.",
                name=str(self.path),
            )
        return entry

    def read(
        self, entry: Entry, part: Box, target: memoryview, shape: tuple[int, ...], target_box: Box
    ) -> int:
        """Reads a part of a tensor into a box of an array.

        Args:
            entry: The tensor.
            part: The part of it.
            target: The bytes of the array, in row-major order.
            shape: The shape of the array.
            target_box: The box in the array to which the part goes.

        Returns:
            The bytes that were read from the file, which are those of the part.
        """
        width, done = DTYPES[entry.dtype][1], 0
        for source, to, count in consecutive_runs(entry.shape, part, shape, target_box):
            size = count * width
            to_bytes = target[to * width : to * width + size]
            self._read_at(entry.begin + source * width, to_bytes)
            done += size
        return done

    def _read_at(self, offset: int, target: memoryview) -> None:
        while target.nbytes:
            count = os.preadv(self._descriptor, [target[:_READ_AT_ONCE]], offset)
            if count == 0:
                raise CheckpointError(
                    f"File {str(self.path)!r} ends at byte {offset}: it is cut, use another "
                    "checkpoint.",
                    name=str(self.path),
                )
            target, offset = target[count:], offset + count


def create(path: Path, header: bytes) -> None:
    """Makes a file with a header, and room for the tensors of it.

    An unfinished file of that name is replaced.
    """
    entries = _tensors_of(header)
    size = max((entry.begin + entry.nbytes for entry in entries.values()), default=len(header))
    path.unlink(missing_ok=True)
    with path.open("xb") as file:
        file.write(header)
        file.truncate(size)


@contextmanager
def open_for_parts(path: Path, header: bytes) -> Iterator[Callable[[str, Box, memoryview], None]]:
    """Opens a file of `create`, and gives what writes a part of a tensor: its key, box and bytes.

    Several processes may write parts that have no common element. Their bytes are on the disk when
    the context ends.

    Raises:
        FileNotFoundError: If no process has made it on a file system that this one sees.
    """
    entries = _tensors_of(header)
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    except OSError as error:
        error.add_note("All hosts have to share the file system of the folder.")
        raise

    def write_part(key: str, part: Box, data: memoryview) -> None:
        entry, width = entries[key], DTYPES[entries[key].dtype][1]
        whole = Box((0,) * len(part.shape), part.shape)
        for to, source, count in consecutive_runs(entry.shape, part, part.shape, whole):
            _write_at(
                descriptor,
                entry.begin + to * width,
                data[source * width : (source + count) * width],
            )

    try:
        yield write_part
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _write_at(descriptor: int, offset: int, data: memoryview) -> None:
    while data.nbytes:
        count = os.pwrite(descriptor, data, offset)
        data, offset = data[count:], offset + count


def _tensors_of(header: bytes) -> dict[str, Entry]:
    """Parses a header that this process has made."""
    return entries_of(header[PREFIX:], None)


@contextmanager
def open_file(path: Path, checksum: str | None = None) -> Iterator[SafetensorsFile]:
    """Opens a file; its header must be valid, and its size as the header says.

    Args:
        path: Its path.
        checksum: The SHA-256 that it must have; None if it has none, or another process asks.

    Raises:
        CheckpointError: If it is not.
    """
    descriptor = folders.open_descriptor(path)
    try:
        if checksum is not None and _checksum_of(descriptor) != checksum:
            raise CheckpointError(
                f"File {str(path)!r} was changed after it was written: its checksum differs. "
                "Nothing of it was used; use another checkpoint.",
                name=str(path),
            )
        try:
            entries = _entries(descriptor)
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            why = str(error)[:_SHOWN]
            raise CheckpointError(
                f"File {str(path)!r} is no safetensors file ({why}): it is damaged, use another "
                "one.",
                name=str(path),
            ) from None
        yield SafetensorsFile(path, entries, descriptor)
    finally:
        os.close(descriptor)


def _checksum_of(descriptor: int) -> str:
    checksum, offset = hashlib.sha256(), 0
    while part := os.pread(descriptor, _READ_AT_ONCE, offset):
        checksum.update(part)
        offset += len(part)
    return checksum.hexdigest()


def _entries(descriptor: int) -> dict[str, Entry]:
    size = os.fstat(descriptor).st_size
    length = int.from_bytes(os.pread(descriptor, PREFIX, 0), "little")
    if length > min(size - PREFIX, file_format.HEADER_BYTES):
        raise CheckpointError(f"it has {size} bytes, its header {length}")
    return entries_of(os.pread(descriptor, length, PREFIX), size)
