"""Dims in segments: as separate dims, the elements that a rank has of them, and redistribution.

A redistribution is a row of stages, each on a tensor with a separate dim for the segments of each
dim. If no one shape has the segments of both layouts as dims, the dims that differ are all-gathered
first, or exchanged (ADR 50).
"""

from collections.abc import Iterable
from functools import lru_cache
from itertools import accumulate, pairwise, product, starmap
from math import prod
from operator import mul

import attrs

from shardcore.domain.cost.collective_cost import Costs
from shardcore.domain.engine.exchange import Exchange, Ranges
from shardcore.domain.engine.redistribution import Step, plan
from shardcore.domain.layouts.chunks import chunk_sizes, in_segments, levels
from shardcore.domain.layouts.derived_layouts import without_blocks
from shardcore.domain.layouts.layout import Layout
from shardcore.domain.layouts.placements import Blocks, Segments, segments_of
from shardcore.domain.layouts.spec import DimSpec, dim_spec


def without_segments(
    layout: Layout, shape: Iterable[int], counts: tuple[int, ...] = ()
) -> tuple[tuple[int, ...], Layout]:
    """Splits each dim of several segments into two: the segments, and the elements of one.

    `counts` has the segments of each dim; those of the layout, if none. See `has_segments`.

    Example:
        >>> from shardcore.domain.layouts.mesh import Mesh
        >>> from shardcore.domain.layouts.placements import Segments
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
        segments = in_segments(size, layout.ranks(dim), layout.blocks[dim], count)
        assert segments is not None, "a dim has these segments"
        sizes += [count, size // count]
        spec += [dim_spec(axes[: segments.outer]), dim_spec(axes[segments.outer :])]
        blocks += [segments.outer_block, segments.block if segments.outer < len(axes) else 1]
    return tuple(sizes), Layout(layout.mesh, tuple(spec), layout.partial, tuple(blocks))


def has_segments(layout: Layout, shape: Iterable[int], counts: tuple[int, ...]) -> bool:
    """Tells whether each dim is sharded within its segments, or between them.

    Example:
        >>> from shardcore.domain.layouts.mesh import Mesh
        >>> halves = Layout(Mesh((2,), ("data",)), ("data",))
        >>> has_segments(halves, (24,), (4,)), has_segments(halves, (24,), (3,))
        (True, False)
    """
    return all(
        in_segments(size, layout.ranks(dim), layout.blocks[dim], count) is not None
        for dim, (size, count) in enumerate(zip(shape, counts, strict=True))
    )


def sharded_dims(
    layout: Layout, shape: tuple[int, ...], target: tuple[int, ...]
) -> tuple[tuple[int, Segments], ...]:
    """Lists the sharded dims of a tensor that becomes one of shape `target`, with their segments.

    A dim that several axes shard in chunks of chunks is of one segment for each chunk, if these
    become steps of a dim.

    Example:
        >>> from shardcore.domain.layouts.mesh import Mesh
        >>> layout = Layout(Mesh((2, 2), ("data", "model")), (("data", "model"),))
        >>> sharded_dims(layout, (8,), (2, 4))
        ((0, Segments(count=2, block=1, outer=1, outer_block=1)),)
        >>> sharded_dims(layout, (8,), (4, 2))
        ((0, Segments(count=1, block=1, outer=0, outer_block=1)),)
    """
    sharded, before = [], 1
    ends = sorted(set(accumulate(target, mul)))
    for dim, size in enumerate(shape):
        ranks, blocks = layout.ranks(dim), layout.blocks[dim]
        segments = segments_of(blocks)
        if segments.count == 1 and sum(count > 1 for count in ranks) > 1:
            for end in ends:
                count, rest = divmod(end, before)
                other = None if rest or count in (0, 1) else in_segments(size, ranks, blocks, count)
                if other is not None and other.outer < len(ranks):
                    segments = other
                    break
        if prod(ranks) > 1:
            sharded.append((dim, segments))
        before *= size
    return tuple(sharded)


def ranges_of(layout: Layout, dim: int, size: int) -> tuple[Ranges, ...]:
    """Lists, for each chunk of `dim`, which has `size` elements, the elements in it.

    Example:
        >>> from shardcore.domain.layouts.mesh import Mesh
        >>> from shardcore.domain.layouts.placements import Segments
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
class Stage:
    """Steps that follow one another on a tensor of one shape."""

    shape: tuple[int, ...]  # the global shape, with a separate dim for the segments of a dim
    layout: Layout  # the layout of a tensor of that shape before the steps
    steps: tuple[Step | Exchange, ...]


@lru_cache(maxsize=4096)
def stages(
    source: Layout, target: Layout, shape: tuple[int, ...], itemsize: int, costs: Costs
) -> tuple[Stage, ...]:
    """Plans the stages from one layout to another, of a tensor of global `shape`.

    Example:
        >>> from shardcore.domain.layouts.mesh import Mesh
        >>> from shardcore.domain.layouts.placements import Segments
        >>> mesh = Mesh((2, 2), ("data", "model"))
        >>> both = Layout(mesh, (("data", "model"),), blocks=(Segments(4, outer=1),))
        >>> (stage,) = stages(both, Layout(mesh, ("data",)), (24,), 4, Costs())
        >>> stage.shape, str(stage.layout), [str(step) for step in stage.steps]
        ((4, 6), "('data', 'model')", ["all_gather over 'model': S(1) -> R"])
    """
    counts = tuple(map(max, source.segments, target.segments))
    layouts = [source, target]
    if not all(has_segments(layout, shape, counts) for layout in layouts):
        exchange = _between_segments(source, target, shape)
        if exchange is not None:
            return (Stage(shape, source, (exchange,)),)
        pairs = zip(source.segments, target.segments, strict=True)
        differ = [dim for dim, (before, after) in enumerate(pairs) if before != after]
        axes = [axis for dim in differ for axis in source.dim_axes(dim)]
        layouts = [source, source.without(*axes), target]
    stage_list = []
    for before, after in pairwise(layouts):
        common = tuple(map(max, before.segments, after.segments))
        sizes, first = without_segments(before, shape, common)
        _, second = without_segments(after, shape, common)
        stage_list.append(Stage(sizes, first, plan(first, second, sizes, itemsize, costs)))
    return tuple(stage_list)


def _between_segments(source: Layout, target: Layout, shape: tuple[int, ...]) -> Exchange | None:
    """Plans the exchange between two layouts that differ in the segments of one dim.

    None if they differ in more, or several axes shard the dim.
    """
    differ = [dim for dim in range(source.ndim) if source.blocks[dim] != target.blocks[dim]]
    same = source.spec == target.spec and source.partial == target.partial
    if not same or len(differ) != 1 or len(source.dim_axes(differ[0])) != 1:
        return None
    (dim,) = differ
    (axis,) = source.dim_axes(dim)
    held, wanted = (ranges_of(layout, dim, shape[dim]) for layout in (source, target))
    return Exchange(axis, dim, held, wanted)


@attrs.frozen
class Shift:
    """The range of a sharded dim, which may begin before the dim or end behind it.

    Args:
        exchange: The exchange of the existing elements.
        size: The number of elements in the range.
        pads: For each rank along the axis, the numbers of elements to add before and after.
        layout: The layout of the range.
    """

    exchange: Exchange
    size: int
    pads: tuple[tuple[int, int], ...]
    layout: Layout

    @classmethod
    def of(cls, layout: Layout, dim: int, length: int, start: int, size: int) -> "Shift | None":
        """Plans the shift to `size` elements from `start` of `dim`, which has `length`.

        None if not one axis alone shards the dim, or a rank would get no element.

        Example:
            >>> from shardcore.domain.layouts.mesh import Mesh
            >>> shift = Shift.of(Layout(Mesh((2,), ("data",)), ("data",)), 0, 8, -1, 10)
            >>> shift.pads, shift.exchange.wanted
            (((1, 0), (0, 1)), ((range(0, 4),), (range(4, 8),)))
        """
        axes = layout.dim_axes(dim)
        if len(axes) != 1 or layout.mesh.axis_size(axes[0]) == 1 or layout.segments[dim] > 1:
            return None
        plain = without_blocks(layout, dim)
        chunks = [chunk for (chunk,) in ranges_of(plain, dim, size)]
        if not all(chunks):
            return None
        wanted, pads = [], []
        for chunk in chunks:
            begin, end = start + chunk.start, start + chunk.stop  # in the dim
            inside = range(min(max(begin, 0), length), min(max(end, 0), length))
            before = max(min(end, 0) - begin, 0)
            wanted.append((inside,))
            pads.append((before, len(chunk) - before - len(inside)))
        exchange = Exchange(axes[0], dim, ranges_of(layout, dim, length), tuple(wanted))
        return cls(exchange, size, tuple(pads), plain)
