"""Sizes of the chunks of a dim, as `torch.chunk` cuts it, between blocks of elements."""

from collections.abc import Iterator
from functools import lru_cache
from math import isqrt


@lru_cache(maxsize=4096)
def chunk_sizes(size: int, ranks: tuple[int, ...], block: int) -> tuple[int, ...]:
    """Returns the sizes of all chunks of a dim of `size` elements, in order.

    `ranks` has the number of ranks along each axis that splits it, the major first. It is split
    between blocks of `block` elements.

    Example:
        >>> chunk_sizes(20, (2,), 4), chunk_sizes(7, (2, 2), 1)
        ((12, 8), (2, 2, 2, 1))
    """
    chunks = [size]
    for count in ranks:
        chunks = [part for each in chunks for part in _cut(each, count, block)]
    return tuple(chunks)


def chunk_at(
    size: int, ranks: tuple[int, ...], block: int, place: tuple[int, ...]
) -> tuple[int, int]:
    """Returns the start and the size of one chunk of a dim, without the other chunks.

    `place` has the coordinate of its rank along each axis that splits the dim. The start of an
    empty chunk is the end of the dim.

    Example:
        >>> chunk_at(7, (2, 2), 1, (1, 0)), chunk_at(5, (4,), 1, (3,))
        ((4, 2), (5, 0))
    """
    start, here = 0, size
    for count, at in zip(ranks, place, strict=True):
        full = -(-here // (block * count)) * block
        start, here = start + full * at, max(min(full, here - full * at), 0)
    return (start, here) if here else (size, 0)


def _cut(size: int, count: int, block: int) -> Iterator[int]:
    full = -(-size // (block * count)) * block
    return (max(min(full, size - full * position), 0) for position in range(count))


@lru_cache(maxsize=4096)
def block_of(size: int, ranks: tuple[int, ...], chunks: tuple[int, ...]) -> int | None:
    """Returns the block by which `size` elements are split into `chunks`, None if there is none.

    It is the smallest one that divides `size`, else the smallest. Any such block divides the first
    chunk.

    Example:
        >>> block_of(20, (2,), (12, 8)), block_of(20, (2,), (15, 5))
        (4, 15)
    """
    first = chunks[0]
    small = [each for each in range(1, isqrt(first) + 1) if first % each == 0]
    divisors = {*small, *(first // each for each in small)}
    fitting = [each for each in divisors if chunk_sizes(size, ranks, each) == chunks]
    return min(fitting, key=lambda each: (size % each != 0, each), default=None)
