"""How a dim is cut into chunks, as `torch.chunk` cuts it, between blocks of elements."""

from functools import lru_cache
from math import isqrt


def chunk(start: int, size: int, parts: int, position: int, block: int) -> tuple[int, int]:
    """The start and size of chunk `position` when `size` elements from `start` are chunked."""
    blocks = -(-size // block)
    full = -(-blocks // parts) * block
    before = min(position * full, size)
    return start + before, min(full, size - before)


@lru_cache(maxsize=4096)
def chunk_sizes(size: int, ranks: tuple[int, ...], block: int) -> tuple[int, ...]:
    """The sizes of all chunks of a dim of `size` elements, in order.

    Args:
        size: The elements of the dim.
        ranks: The number of ranks along each axis that splits it, the major first.
        block: The elements of a block.

    Example:
        >>> chunk_sizes(20, (2,), 4), chunk_sizes(7, (2, 2), 1)
        ((12, 8), (2, 2, 2, 1))
    """
    chunks: tuple[int, ...] = (size,)
    for count in ranks:
        chunks = tuple(
            chunk(0, each, count, position, block)[1]
            for each in chunks
            for position in range(count)
        )
    return chunks


@lru_cache(maxsize=4096)
def block_of(size: int, ranks: tuple[int, ...], chunks: tuple[int, ...]) -> int | None:
    """The block by which `size` elements are split into `chunks`, None if there is none.

    It is the least one that divides `size`, else the least one. Any such block divides the first
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


def least_block(size: int, ranks: tuple[int, ...], block: int) -> int:
    """The block that stands for all that split `size` elements as `block` does."""
    return block_of(size, ranks, chunk_sizes(size, ranks, block)) or 1
