"""Segments of dims as separate dims, and the exchange of elements that no placement describes.

A rank may hold or want parts of several segments, or a slice that begins anywhere.
"""

from collections.abc import Iterable, Iterator
from functools import cached_property
from itertools import accumulate
from typing import ClassVar, TypeAlias

import attrs

from shardcore.domain.chunks import block_of
from shardcore.domain.layout import Layout
from shardcore.domain.placements import Blocks, segments_of
from shardcore.domain.spec import DimSpec

Ranges: TypeAlias = tuple[range, ...]


def without_segments(
    layout: Layout, shape: Iterable[int], counts: tuple[int, ...] = ()
) -> tuple[tuple[int, ...], Layout]:
    """Returns the shape and the layout with a separate dim for the segments of each dim.

    `counts` has the segments of each dim; those of the layout, if none. See `has_segments`.

    Example:
        >>> from shardcore.domain.mesh import Mesh
        >>> from shardcore.domain.placements import Segments
        >>> layout = Layout(Mesh((2,), ("data",)), ("data",), blocks=(Segments(4),))
        >>> shape, plain = without_segments(layout, (24,))
        >>> shape, str(plain), layout.local_shape((24,), rank=0)
        ((4, 6), "(None, 'data')", (12,))
        >>> halves = Layout(Mesh((2,), ("data",)), ("data",))
        >>> str(without_segments(halves, (24,), (4,))[1])
        "('data', None)"
    """
    counts = counts or layout.segments
    if set(counts) <= {1}:
        return tuple(shape), layout
    sizes: list[int] = []
    spec: list[DimSpec] = []
    blocks: list[Blocks] = []
    for dim, (size, count) in enumerate(zip(shape, counts, strict=True)):
        entry, (own, block) = layout.spec[dim], segments_of(layout.blocks[dim])
        outer = _block_of_segments(layout, dim, size, count) if own < count and entry else None
        if count > 1:
            sizes.append(count)
            spec.append(entry if outer else None)
            blocks.append(outer or 1)
        sizes.append(size // count)
        spec.append(None if outer else entry)
        blocks.append(1 if outer else block)
    return tuple(sizes), Layout(layout.mesh, tuple(spec), layout.partial, tuple(blocks))


def has_segments(layout: Layout, shape: Iterable[int], counts: tuple[int, ...]) -> bool:
    """Returns whether each dim is split within its segments, or between them.

    Example:
        >>> from shardcore.domain.mesh import Mesh
        >>> halves = Layout(Mesh((2,), ("data",)), ("data",))
        >>> has_segments(halves, (24,), (4,)), has_segments(halves, (24,), (3,))
        (True, False)
    """
    return all(
        own == count
        or not layout.spec[dim]
        or (own == 1 and _block_of_segments(layout, dim, size, count) is not None)
        for dim, (size, own, count) in enumerate(zip(shape, layout.segments, counts, strict=True))
    )


def _block_of_segments(layout: Layout, dim: int, size: int, count: int) -> int | None:
    """Returns the block in which `dim` is split between `count` segments; None if within one."""
    inner, chunks = size // count, layout.chunk_sizes(dim, size)
    if not inner or any(chunk % inner for chunk in chunks):
        return None
    return block_of(count, layout.ranks(dim), tuple(chunk // inner for chunk in chunks))


def ranges_of(layout: Layout, dim: int, size: int) -> tuple[Ranges, ...]:
    """Returns, for each chunk of `dim`, which has `size` elements, the elements in it.

    Example:
        >>> from shardcore.domain.mesh import Mesh
        >>> from shardcore.domain.placements import Segments
        >>> layout = Layout(Mesh((2,), ("model",)), ("model",), blocks=(Segments(3),))
        >>> ranges_of(layout, 0, 12)[0]
        (range(0, 2), range(4, 6), range(8, 10))
    """
    count = layout.segments[dim]
    chunks = [each // count for each in layout.chunk_sizes(dim, size)]
    ends = accumulate(chunks)
    starts = [segment * (size // count) for segment in range(count)]
    return tuple(
        tuple(range(start + end - chunk, start + end) for start in starts)
        for chunk, end in zip(chunks, ends, strict=True)
    )


@attrs.frozen
class Exchange:
    """A step in which each rank along an axis gets elements of a dim from other ranks.

    Example:
        >>> halves = (range(0, 3),), (range(3, 6),)
        >>> shifted = Exchange("model", 0, halves, ((range(1, 4),), (range(4, 6),)))
        >>> shifted.sent(1, 0), shifted.received(0), shifted.is_local
        ((slice(0, 1, None),), ((0, 2), (1, 1)), False)
    """

    kind: ClassVar = "exchange"

    axis: str
    dim: int
    held: tuple[Ranges, ...]  # for each place along the axis, the elements that its rank holds
    # For each place, the elements that its rank gets. Some rank holds each of them.
    wanted: tuple[Ranges, ...]

    @cached_property
    def is_local(self) -> bool:
        """Whether each rank holds all that it wants, so that nothing is sent."""
        return all(
            owner == place for place in range(len(self.held)) for owner, _ in self.received(place)
        )

    def sent(self, place: int, peer: int) -> tuple[slice, ...]:
        """Returns the slices of the shard at `place` that `peer` wants, in its order."""
        return tuple(part for _, part in _common(self.held[place], self.wanted[peer]))

    def received(self, place: int) -> tuple[tuple[int, int], ...]:
        """Returns the owner and the size of each part that the rank at `place` wants, in order."""
        parts = (
            (at, owner, part.stop - part.start)
            for owner, held in enumerate(self.held)
            for at, part in _common(held, self.wanted[place])
        )
        return tuple((owner, size) for _, owner, size in sorted(parts))


def _common(held: Ranges, wanted: Ranges) -> Iterator[tuple[int, slice]]:
    """Yields the parts that both have: the position of each in `wanted`, its slice of `held`."""
    for first, one in zip(_starts(wanted), wanted, strict=True):
        for start, other in zip(_starts(held), held, strict=True):
            begin, end = max(one.start, other.start), min(one.stop, other.stop)
            if begin < end:
                offset = start - other.start
                yield first + begin - one.start, slice(begin + offset, end + offset)


def _starts(ranges: Ranges) -> Iterator[int]:
    return accumulate(map(len, ranges[:-1]), initial=0)
