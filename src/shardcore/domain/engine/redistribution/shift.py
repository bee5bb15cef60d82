"""Shifts: a range of a dim that one axis shards, by an exchange of elements between its ranks."""

import attrs

from shardcore.domain.engine.redistribution.exchange import Exchange
from shardcore.domain.engine.redistribution.segments import ranges_of
from shardcore.domain.layouts.derived_layouts import without_blocks
from shardcore.domain.layouts.layout import Layout


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
        """Returns the shift to `size` elements from `start` of `dim`, which has `length`.

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
