"""Sizes of the chunks of a dim, as `torch.chunk` cuts it, between blocks of elements."""

from collections.abc import Iterator
from functools import lru_cache
from itertools import product
from math import isqrt, prod
from typing import TypeAlias

from shardcore.domain.layouts.placements import Blocks, Segments, blocks_of, segments_of


@lru_cache(maxsize=4096)
def chunk_sizes(size: int, ranks: tuple[int, ...], block: int) -> tuple[int, ...]:
    """Cuts a dim of `size` elements as `torch.chunk`; lists the sizes of all chunks in order.

    `ranks` has the number of ranks along each axis that shards it, the major first. It is sharded
    between blocks of `block` elements.

    Example:
        >>> chunk_sizes(20, (2,), 4), chunk_sizes(7, (2, 2), 1)
        ((12, 8), (2, 2, 2, 1))
    """
    chunks = [size]
    for count in ranks:
        chunks = [part for chunk in chunks for part in _cut(chunk, count, block)]
    return tuple(chunks)


def chunk_at(
    size: int, ranks: tuple[int, ...], block: int, coordinate: tuple[int, ...]
) -> tuple[int, int]:
    """Computes the start and the size of one chunk of a dim, without the other chunks.

    `coordinate` has the coordinate of its rank along each axis that shards the dim. The start of an
    empty chunk is the end of the dim.

    Example:
        >>> chunk_at(7, (2, 2), 1, (1, 0)), chunk_at(5, (4,), 1, (3,))
        ((4, 2), (5, 0))
    """
    start, here = 0, size
    for count, at in zip(ranks, coordinate, strict=True):
        full = -(-here // (block * count)) * block
        start, here = start + full * at, max(min(full, here - full * at), 0)
    return (start, here) if here else (size, 0)


def _cut(size: int, count: int, block: int) -> Iterator[int]:
    full = -(-size // (block * count)) * block
    return (max(min(full, size - full * position), 0) for position in range(count))


@lru_cache(maxsize=4096)
def block_of(size: int, ranks: tuple[int, ...], chunks: tuple[int, ...]) -> int | None:
    """Finds the block by which `size` elements are cut into `chunks`, None if there is none.

    It is the smallest one that divides `size`, else the smallest. Any such block divides the first
    chunk.

    Example:
        >>> block_of(20, (2,), (12, 8)), block_of(20, (2,), (15, 5))
        (4, 15)
    """
    first = chunks[0]
    small = [divisor for divisor in range(1, isqrt(first) + 1) if first % divisor == 0]
    divisors = {*small, *(first // divisor for divisor in small)}
    fitting = [block for block in divisors if chunk_sizes(size, ranks, block) == chunks]
    return min(fitting, key=lambda block: (size % block != 0, block), default=None)


# What is sharded: its size, the number of ranks along each axis that shards it, and the block.
Level: TypeAlias = tuple[int, tuple[int, ...], int]


def levels(size: int, ranks: tuple[int, ...], blocks: Blocks) -> tuple[Level, Level]:
    """Separates how the segments of a dim are sharded, and how each of them is.

    Example:
        >>> levels(24, (2, 3), Segments(4, outer=1)), levels(24, (2, 3), 2)
        (((4, (2,), 1), (6, (3,), 1)), ((1, (), 1), (24, (2, 3), 2)))
    """
    segments = segments_of(blocks)
    return (
        (segments.count, ranks[: segments.outer], segments.outer_block),
        (size // segments.count, ranks[segments.outer :], segments.block),
    )


@lru_cache(maxsize=4096)
def sizes_in_blocks(size: int, ranks: tuple[int, ...], blocks: Blocks) -> tuple[int, ...]:
    """Lists the sizes of all chunks of a dim of `size` elements in `blocks`, in order.

    Example:
        >>> sizes_in_blocks(21, (2, 2), Segments(7, outer=1))
        (8, 4, 6, 3)
    """
    segments, elements = (chunk_sizes(*level) for level in levels(size, ranks, blocks))
    return tuple(map(prod, product(segments, elements)))


@lru_cache(maxsize=4096)
def normal_blocks(size: int, ranks: tuple[int, ...], blocks: Blocks) -> Blocks:
    """Finds the least blocks by which ranks get the same elements of a dim.

    Example:
        >>> normal_blocks(24, (2,), 4), normal_blocks(24, (2,), Segments(4, 3, outer=1))
        (1, 1)
    """
    if prod(ranks) == 1:
        return 1
    segments = segments_of(blocks)
    outer = segments.outer
    while outer and ranks[outer - 1] == 1:
        outer -= 1
    between, within = levels(size, ranks, blocks)
    least = block_of(within[0], within[1], chunk_sizes(*within)) or 1
    if not outer:
        return blocks_of(segments.count, least)
    chunks = chunk_sizes(*between)
    # A rank that has part of one segment, or segments as a whole, has consecutive elements.
    if max(chunks) <= 1 or prod(within[1]) == 1:
        plain = block_of(size, ranks, sizes_in_blocks(size, ranks, blocks))
        if plain is not None or not size:
            return plain or 1
    return Segments(segments.count, least, outer, block_of(between[0], between[1], chunks) or 1)


def in_segments(size: int, ranks: tuple[int, ...], blocks: Blocks, count: int) -> Segments | None:
    """Finds the `count` segments by which ranks get the same elements; None if there are none.

    Example:
        >>> in_segments(24, (2, 2), 1, 2), in_segments(24, (2, 2), 1, 6)
        (Segments(count=2, block=1, outer=1, outer_block=1), None)
        >>> in_segments(24, (2, 2), 1, 4)
        Segments(count=4, block=1, outer=2, outer_block=1)
    """
    segments = segments_of(blocks)
    if segments.count == count:
        return segments
    if not ranks:
        return Segments(count)
    inner, rest = divmod(size, count)
    if segments.count > 1 or rest or not inner:
        return None
    for outer in range(len(ranks), 0, -1):
        chunks = chunk_sizes(size, ranks[:outer], segments.block)
        counts = tuple(chunk // inner for chunk in chunks)
        if any(chunk % inner for chunk in chunks):
            continue
        is_one = max(counts) == 1
        if outer == len(ranks) or is_one:
            block = segments.block if outer < len(ranks) else 1
            if outer_block := block_of(count, ranks[:outer], counts):
                return Segments(count, block, outer, outer_block)
    return None


def blocks_along(size: int, blocks: Blocks, position: int) -> Blocks:
    """Computes the blocks of a dim as one of the axes that shard it would shard it alone.

    The axis is at `position` among them.

    Example:
        >>> [blocks_along(24, Segments(4, 2, outer=1), position) for position in (0, 1)]
        [6, Segments(count=4, block=2, outer=0, outer_block=1)]
    """
    segments = segments_of(blocks)
    if position < segments.outer:
        return segments.outer_block * (size // segments.count)
    return blocks_of(segments.count, segments.block)
