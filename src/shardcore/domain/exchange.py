"""Exchange of elements of one dim between ranks, for parts that no placement describes.

A rank may hold or want parts of several segments, or a slice that begins anywhere.
"""

from collections.abc import Iterator
from functools import cached_property
from itertools import accumulate
from typing import ClassVar, TypeAlias

import attrs

from shardcore.domain.layout import Layout

Ranges: TypeAlias = tuple[range, ...]


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
