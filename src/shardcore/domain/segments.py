"""Segments of dims as separate dims, and the exchange of elements that no placement describes.

A rank may hold or want parts of several segments, or a slice that begins anywhere.
"""

from collections.abc import Iterable, Iterator
from functools import cached_property
from itertools import accumulate, pairwise, product, starmap
from math import prod
from operator import mul
from typing import ClassVar, TypeAlias

import attrs

from shardcore.domain.chunks import chunk_sizes, in_segments, levels
from shardcore.domain.layout import Layout
from shardcore.domain.placements import Blocks, Segments, segments_of
from shardcore.domain.spec import DimSpec, dim_spec

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
        if count == 1:
            sizes.append(size)
            spec.append(layout.spec[dim])
            blocks.append(layout.blocks[dim])
            continue
        axes = layout.dim_axes(dim)
        found = in_segments(size, layout.ranks(dim), layout.blocks[dim], count)
        assert found is not None, "a dim has these segments"
        sizes += [count, size // count]
        spec += [dim_spec(axes[: found.outer]), dim_spec(axes[found.outer :])]
        blocks += [found.outer_block, found.block if found.outer < len(axes) else 1]
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
        in_segments(size, layout.ranks(dim), layout.blocks[dim], count) is not None
        for dim, (size, count) in enumerate(zip(shape, counts, strict=True))
    )


def split_dims(
    layout: Layout, shape: tuple[int, ...], target: tuple[int, ...]
) -> tuple[tuple[int, Segments], ...]:
    """Returns the split dims of a tensor that becomes one of shape `target`, with their segments.

    A dim that several axes split in chunks of chunks is of one segment for each chunk, if these
    become steps of a dim.

    Example:
        >>> from shardcore.domain.mesh import Mesh
        >>> layout = Layout(Mesh((2, 2), ("data", "model")), (("data", "model"),))
        >>> split_dims(layout, (8,), (2, 4))
        ((0, Segments(count=2, block=1, outer=1, outer_block=1)),)
        >>> split_dims(layout, (8,), (4, 2))
        ((0, Segments(count=1, block=1, outer=0, outer_block=1)),)
    """
    found, before = [], 1
    ends = sorted(set(accumulate(target, mul)))
    for dim, size in enumerate(shape):
        ranks, blocks = layout.ranks(dim), layout.blocks[dim]
        each = segments_of(blocks)
        if each.count == 1 and sum(count > 1 for count in ranks) > 1:
            for end in ends:
                count, rest = divmod(end, before)
                other = None if rest or count in (0, 1) else in_segments(size, ranks, blocks, count)
                if other is not None and other.outer < len(ranks):
                    each = other
                    break
        if prod(ranks) > 1:
            found.append((dim, each))
        before *= size
    return tuple(found)


def ranges_of(layout: Layout, dim: int, size: int) -> tuple[Ranges, ...]:
    """Returns, for each chunk of `dim`, which has `size` elements, the elements in it.

    Example:
        >>> from shardcore.domain.mesh import Mesh
        >>> from shardcore.domain.placements import Segments
        >>> layout = Layout(Mesh((2,), ("model",)), ("model",), blocks=(Segments(3),))
        >>> ranges_of(layout, 0, 12)[0]
        (range(0, 2), range(4, 6), range(8, 10))
    """
    of_segments, of_elements = levels(size, layout.ranks(dim), layout.blocks[dim])
    segments, elements = map(_consecutive, (chunk_sizes(*of_segments), chunk_sizes(*of_elements)))
    steps = of_elements[0]
    return tuple(
        tuple(range(segment * steps + part.start, segment * steps + part.stop) for segment in held)
        for held, part in product(segments, elements)
    )


def _consecutive(sizes: Iterable[int]) -> list[range]:
    ends = accumulate(sizes, initial=0)
    return list(starmap(range, pairwise(ends)))


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
