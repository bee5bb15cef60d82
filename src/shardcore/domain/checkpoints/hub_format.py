"""Folders of safetensors files, as Transformers and the Hugging Face hub have them."""

from collections.abc import Iterable, Mapping
from typing import Final, Protocol, TypeVar

INDEX: Final = "model.safetensors.index.json"
DEFAULT_LIMIT: Final = 5 * 2**30  # bytes of a file that has several tensors, as in Keras


class Sized(Protocol):
    """A tensor of which the bytes are known."""

    @property
    def nbytes(self) -> int:
        """The bytes of its values."""


SizedT = TypeVar("SizedT", bound=Sized)


def files_of(tensors: Iterable[SizedT], limit: int) -> dict[str, list[SizedT]]:
    """Divides tensors into files, by name, in order.

    Example:
        >>> list(files_of([memoryview(b"ab"), memoryview(b"abc")], limit=5))
        ['model.safetensors']
        >>> list(files_of([memoryview(b"ab"), memoryview(b"abcd")], limit=5))
        ['model-00001-of-00002.safetensors', 'model-00002-of-00002.safetensors']
    """
    parts = divide(tensors, limit)
    if len(parts) == 1:
        return {"model.safetensors": parts[0]}
    return {
        f"model-{number:05}-of-{len(parts):05}.safetensors": part
        for number, part in enumerate(parts, 1)
    }


def divide(tensors: Iterable[SizedT], limit: int) -> list[list[SizedT]]:
    """Divides tensors into parts of at most `limit` bytes; each has at least one tensor.

    Example:
        >>> parts = divide([memoryview(bytes(size)) for size in (2, 3, 9, 1)], 5)
        >>> [[tensor.nbytes for tensor in part] for part in parts]
        [[2, 3], [9], [1]]
    """
    parts: list[list[SizedT]] = [[]]
    size = 0
    for tensor in tensors:
        if parts[-1] and size + tensor.nbytes > limit:
            parts.append([])
            size = 0
        parts[-1].append(tensor)
        size += tensor.nbytes
    return parts


def index_of(total: int, weight_map: Mapping[str, object]) -> dict[str, object]:
    """Builds the index of several files: the bytes of all tensors, and the file of each."""
    return {"metadata": {"total_size": total}, "weight_map": weight_map}
