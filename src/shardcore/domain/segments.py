"""Layouts in which the segments of a dim become a separate dim, so that shards are one piece."""

from collections.abc import Iterable

from shardcore.domain.chunks import block_of
from shardcore.domain.layout import Layout
from shardcore.domain.placements import Blocks, segments_of
from shardcore.domain.spec import DimSpec


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
    sizes: list[int] = []
    spec: list[DimSpec] = []
    blocks: list[Blocks] = []
    counts = counts or layout.segments
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
