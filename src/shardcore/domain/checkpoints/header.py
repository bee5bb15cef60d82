"""The header of a safetensors file: its tensors, and where their bytes are in the file."""

import json
import math
from collections.abc import Iterable, Mapping
from typing import Any, Final

import attrs

from shardcore.domain.checkpoints import bounds
from shardcore.domain.checkpoints.index import DTYPES
from shardcore.domain.errors import CheckpointError

# The bytes before the header, which have its length.
PREFIX: Final = 8
_NAMES = {code: name for name, (code, _) in DTYPES.items()}


@attrs.frozen
class Entry:
    """A tensor in a file: its dtype, its shape, and where its bytes begin in the file."""

    dtype: str
    shape: tuple[int, ...]
    begin: int

    @property
    def nbytes(self) -> int:
        """The bytes of its elements."""
        return math.prod(self.shape) * DTYPES[self.dtype][1]


def header_of(tensors: Iterable[tuple[str, str, tuple[int, ...]]]) -> bytes:
    """Returns the beginning of a file of tensors, each a key, a dtype and a shape.

    Example:
        >>> header_of([("a", "int8", (2,))])[8:]
        b'{"a":{"dtype":"I8","shape":[2],"data_offsets":[0,2]}}   '
    """
    entries, end = {}, 0
    for key, dtype, shape in tensors:
        code, width = DTYPES[dtype]
        begin, end = end, end + math.prod(shape) * width
        entries[key] = {"dtype": code, "shape": list(shape), "data_offsets": [begin, end]}
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(PREFIX, "little") + text


def entries_of(header: bytes, size: int) -> dict[str, Entry]:
    """Returns the tensors of a file of `size` bytes, which they fill without gaps and overlaps.

    Args:
        header: Its header, without the length.
        size: Its bytes.

    Raises:
        CheckpointError: If they do not fill it, or a size is impossible.
        ValueError: If a list has another length.
        KeyError: If a key is missing. TypeError: If a value is of another type.

    Example:
        >>> header = header_of([("a", "int8", (2,))])
        >>> entries_of(header[8:], len(header) + 2)
        {'a': Entry(dtype='int8', shape=(2,), begin=64)}
    """
    content = bounds.parse_json(header, bounds.HEADER_BYTES)
    if not isinstance(content, dict):
        raise CheckpointError("its header is no dict")
    content.pop("__metadata__", None)
    at = PREFIX + len(header)
    entries = {key: _entry(fields, at) for key, fields in content.items()}
    for entry in sorted(entries.values(), key=lambda entry: (entry.begin, entry.nbytes)):
        if entry.begin != at:
            raise CheckpointError(f"a tensor begins at byte {entry.begin}, not {at}")
        at += entry.nbytes
    if at != size:
        raise CheckpointError(f"it has {size} bytes, its tensors end at {at}")
    return entries


def _entry(content: Mapping[str, Any], data: int) -> Entry:
    """Returns a tensor of a header; the bytes of tensors begin at `data` in the file."""
    numbers, offsets = content["shape"], content["data_offsets"]
    if not (bounds.are_numbers(numbers) and bounds.are_numbers(offsets)):
        raise CheckpointError("a size is no number")
    shape, (begin, end) = tuple(numbers), offsets
    if len(shape) > bounds.DIMS or min((*shape, begin, end)) < 0:
        raise CheckpointError("a shape has too many dims, or a size is negative")
    entry = Entry(_NAMES[content["dtype"]], shape, data + begin)
    if entry.nbytes != end - begin:
        raise CheckpointError(f"{end - begin} bytes for {entry.dtype} of shape {shape}")
    return entry
