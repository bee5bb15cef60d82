"""The format of a checkpoint's files: dtypes, the header of a safetensors file, and bounds.

A file may be made to take memory or time. So its text is counted before it is parsed, and its
numbers and names are bounded before they are used. The bounds are far above those of any model.
"""

import json
import math
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any, Final, cast

import attrs

from shardcore.domain.errors import CheckpointError
from shardcore.domain.garbage import without_collection

INDEX_BYTES: Final = 2**27  # a hundred thousand variables of eight pieces take a third
HEADER_BYTES: Final = 2**26
# The values of a text: an empty list, which takes 3 bytes of it, takes 64 in memory.
VALUES: Final = 2**22 * 3 // 2
DIMS: Final = 64  # those of NumPy and torch
NUMBER: Final = 2**63 - 1
NAME: Final = 4096  # characters
NESTING: Final = 64

REMEDY: Final = "use another checkpoint, or save this one again"


def parse_json(text: bytes, most: int) -> object:
    """Parses a JSON text of at most `most` bytes, with garbage collection paused.

    Raises:
        CheckpointError: If it has more bytes or values, or is no JSON.

    Example:
        >>> parse_json(b'{"shape": [2]}', 100)
        {'shape': [2]}
    """
    if len(text) > most:
        raise CheckpointError(f"it has more than {most} bytes")
    # Commas and brackets in names count too. Strings have quotes besides.
    values = sum(map(text.count, (b",", b"[", b"{"))) + text.count(b'"') // 4
    if values > VALUES:
        raise CheckpointError(f"it has more than {VALUES} values")
    try:
        with without_collection():  # values of JSON have no cycles
            return json.loads(text.decode())
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"it is no JSON ({error})") from None


def _are_numbers(content: object) -> bool:
    """Tells whether `content` is a list of integers of at most 63 bits; a bool is none.

    Example:
        >>> _are_numbers([1, 2]), _are_numbers([True]), _are_numbers([10**1000])
        (True, False, False)
    """
    return (
        type(content) is list
        and set(map(type, content)) <= {int}
        and max(content, default=0) <= NUMBER
        and min(content, default=0) >= -NUMBER
    )


def first_repeated(names: list[str]) -> str | None:
    """Finds the first name that is there twice, None if none is.

    Example:
        >>> first_repeated(["a", "b", "b", "a"])
        'b'
    """
    seen: set[str] = set()
    for name in names:
        if name in seen:
            return name
        seen.add(name)
    return None


def is_nested_deeper(content: object, most: int = NESTING) -> bool:
    """Tells whether lists and dicts in `content` are nested deeper than `most`.

    Example:
        >>> is_nested_deeper({"a": [1]}, 2), is_nested_deeper({"a": [[]]}, 2)
        (False, True)
    """
    level: list[object] = [content]
    for _ in range(most):
        level = [value for outer in level for value in _values(outer)]
    return any(isinstance(value, dict | list) for value in level)


def _values(outer: object) -> Iterable[object]:
    return outer.values() if isinstance(outer, dict) else outer if isinstance(outer, list) else ()


def fields_of(content: object, kinds: Mapping[str, type]) -> dict[str, Any]:
    """Checks that `content` has exactly the fields of `kinds`, each of its type, and copies it."""
    if not isinstance(content, dict) or content.keys() != kinds.keys():
        raise CheckpointError(f"Expected the fields {', '.join(kinds)} in the index: {REMEDY}.")
    for name, kind in kinds.items():
        if type(content[name]) is not kind:
            raise CheckpointError(
                f"Expected {kind.__name__} as {name!r} in the index, got "
                f"{type(content[name]).__name__}: {REMEDY}.",
                name=name,
                got=str(type(content[name]).__name__),
            )
    return dict(content)


def numbers_of(content: object, name: str) -> tuple[int, ...]:
    """Checks the numbers in a list of variable `name`."""
    if not _are_numbers(content):
        raise CheckpointError(
            f"Expected lists of numbers for variable {name!r} in the index.", name=name
        )
    return tuple(cast("list[int]", content))


def check_texts(texts: Iterable[object]) -> None:
    """Raises if one is no text, or too long."""
    if not all(type(text) is str and len(text) <= NAME for text in texts):
        raise CheckpointError(
            f"Expected texts of at most {NAME} characters in the index: {REMEDY}."
        )


def names_in(content: object) -> list[str]:
    """Reads the names in a list of the index that is not checked yet: others are left out."""
    fields = (
        [field for field in content if isinstance(field, dict)] if type(content) is list else []
    )
    return [field["name"] for field in fields if isinstance(field.get("name"), str)]


# The dtypes of variables, by the name of Keras and torch: the code in a safetensors file, and the
# bytes of an element.
DTYPES: Final = {
    "bool": ("BOOL", 1),
    "uint8": ("U8", 1),
    "uint16": ("U16", 2),
    "uint32": ("U32", 4),
    "uint64": ("U64", 8),
    "int8": ("I8", 1),
    "int16": ("I16", 2),
    "int32": ("I32", 4),
    "int64": ("I64", 8),
    "float8_e4m3fn": ("F8_E4M3", 1),
    "float8_e5m2": ("F8_E5M2", 1),
    "bfloat16": ("BF16", 2),
    "float16": ("F16", 2),
    "float32": ("F32", 4),
    "float64": ("F64", 8),
    "complex64": ("C64", 8),
}

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
        return nbytes_of(self.dtype, self.shape)


def nbytes_of(dtype: str, shape: tuple[int, ...]) -> int:
    """Computes the bytes of the elements of a tensor.

    Example:
        >>> nbytes_of("bfloat16", (2, 3))
        12
    """
    return math.prod(shape) * DTYPES[dtype][1]


def header_of(
    tensors: Iterable[tuple[str, str, tuple[int, ...]]],
    metadata: Mapping[str, str] = MappingProxyType({}),
) -> bytes:
    """Builds the beginning of a file of tensors, each a key, a dtype and a shape.

    Example:
        >>> header_of([("a", "int8", (2,))])[8:]
        b'{"a":{"dtype":"I8","shape":[2],"data_offsets":[0,2]}}   '
    """
    entries: dict[str, object] = {"__metadata__": dict(metadata)} if metadata else {}
    end = 0
    for key, dtype, shape in tensors:
        begin, end = end, end + nbytes_of(dtype, shape)
        entries[key] = {
            "dtype": DTYPES[dtype][0],
            "shape": list(shape),
            "data_offsets": [begin, end],
        }
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(PREFIX, "little") + text


def entries_of(header: bytes, size: int | None) -> dict[str, Entry]:
    """Parses a header; its tensors fill the file of `size` bytes without gaps and overlaps.

    Args:
        header: Its header, without the length.
        size: Its bytes; None if the tensors are still to be written.

    Raises:
        CheckpointError: If they do not fill it, or a size is impossible.
        ValueError: If a list has another length.
        KeyError: If a key is missing. TypeError: If a value is of another type.

    Example:
        >>> header = header_of([("a", "int8", (2,))])
        >>> entries_of(header[8:], len(header) + 2)
        {'a': Entry(dtype='int8', shape=(2,), begin=64)}
    """
    content = parse_json(header, HEADER_BYTES)
    if not isinstance(content, dict):
        raise CheckpointError("its header is no dict")
    content.pop("__metadata__", None)
    at = PREFIX + len(header)
    entries = {key: _entry(fields, at) for key, fields in content.items()}
    for entry in sorted(entries.values(), key=lambda entry: (entry.begin, entry.nbytes)):
        if entry.begin != at:
            raise CheckpointError(f"a tensor begins at byte {entry.begin}, not {at}")
        at += entry.nbytes
    if size is not None and at != size:
        raise CheckpointError(f"it has {size} bytes, its tensors end at {at}")
    return entries


def _entry(content: Mapping[str, Any], data: int) -> Entry:
    """Parses a tensor of a header; the bytes of tensors begin at `data` in the file."""
    numbers, offsets = content["shape"], content["data_offsets"]
    if not (_are_numbers(numbers) and _are_numbers(offsets)):
        raise CheckpointError("a size is no number")
    shape, (begin, end) = tuple(numbers), offsets
    if len(shape) > DIMS or min((*shape, begin, end)) < 0:
        raise CheckpointError("a shape has too many dims, or a size is negative")
    entry = Entry(_NAMES[content["dtype"]], shape, data + begin)
    if entry.nbytes != end - begin:
        raise CheckpointError(f"{end - begin} bytes for {entry.dtype} of shape {shape}")
    return entry
