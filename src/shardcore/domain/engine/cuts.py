"""Cuts of factors: the axes that shard one, and where; and the blocks of dims that follow."""

from collections.abc import Mapping

import attrs

from shardcore.domain.engine.rules.rule import Dim
from shardcore.domain.layouts.chunks import block_of, chunk_sizes, in_segments
from shardcore.domain.layouts.placements import Blocks, Segments, blocks_of, segments_of

Axes = tuple[str, ...]


@attrs.frozen
class Cut:
    """The sharding of a factor: what `Segments` are to a dim, in steps instead of elements."""

    axes: Axes = ()  # the mesh axes that shard it, the major first
    block: int = 1  # the number of consecutive steps that stay together
    count: int = 1  # the number of segments of steps, each of which is sharded alike
    outer: Axes = ()  # the axes that shard the segments themselves, if they shard the factor
    outer_block: int = 1  # the number of segments that stay together

    @property
    def number_of_outer(self) -> int:
        """The number of its axes that shard the segments themselves: the first ones."""
        return sum(axis in self.outer for axis in self.axes)

    def outer_first(self, *axes: str) -> Axes:
        """Sorts `axes`, each once: first those that shard the segments themselves."""
        return tuple(dict.fromkeys(sorted(axes, key=lambda axis: axis not in self.outer)))


def sharding_of(
    dim: Dim, cuts: Mapping[str, Cut], extents: Mapping[str, int]
) -> tuple[Axes, Blocks]:
    """Combines the cuts of the factors of `dim`: the axes that shard it, and its blocks.

    Example:
        >>> cuts = {"a": Cut(("data",)), "b": Cut(("model",), block=2)}
        >>> sharding_of(Dim("b", outer="a"), cuts, {"a": 4, "b": 6})
        (('data', 'model'), Segments(count=4, block=2, outer=1, outer_block=1))
    """
    outer, cut = (cuts.get(factor or "", Cut()) for factor in (dim.outer, dim.factor))
    count = dim.count * extents.get(dim.outer or "", 1) * cut.count
    if not outer.axes:
        return cut.axes, _blocks(cut, count, dim.block)
    if not cut.axes:
        return outer.axes, _blocks(outer, outer.count, dim.size({**extents, dim.outer or "": 1}))
    together = dim.count * cut.count * outer.block
    blocks = Segments(count, dim.block * cut.block, len(outer.axes), together)
    return (*outer.axes, *cut.axes), blocks


def _blocks(cut: Cut, count: int, block: int) -> Blocks:
    """Computes the blocks of a dim of `count` segments with `block` elements a step."""
    outer = cut.number_of_outer
    if outer:
        return Segments(count, block * cut.block, outer, cut.outer_block)
    return blocks_of(count, block * cut.block) if cut.axes else 1


def cut_of(
    dim: Dim, axis: str, axes: Axes, ranks: tuple[int, ...], blocks: Blocks, extents: dict[str, int]
) -> tuple[str, Cut]:
    """Finds the factor by which `axis` shards a dim that `axes` shard, and its cut, without axes.

    A factor that is sharded elsewhere than between its steps has a cut of blocks of 1.

    Example:
        >>> sharded = ("data", "model"), (2, 2), Segments(4, 2, outer=1)
        >>> cut_of(Dim("b", outer="a"), "model", *sharded, {"a": 4, "b": 6})
        ('b', Cut(axes=(), block=2, count=1, outer=(), outer_block=1))
    """
    assert dim.factor is not None, "a dim that can be sharded"
    segments = segments_of(blocks)
    if dim.outer is None:
        left, rest = divmod(segments.count, dim.count)
        if rest:
            return dim.factor, Cut()
        cut = _within(dim, segments, left, ranks, extents)
        if segments.outer and cut.count == left:
            cut = attrs.evolve(cut, outer=axes[: segments.outer], outer_block=segments.outer_block)
        return dim.factor, cut
    count = dim.count * extents[dim.outer]
    if segments.count == 1:
        segments = in_segments(dim.size(extents), ranks, blocks, count) or segments
    left, rest = divmod(segments.count, count)
    if rest:
        return dim.outer, Cut()
    if axis not in axes[: segments.outer]:
        return dim.factor, _within(dim, segments, left, ranks, extents)
    together, ranks = dim.count * left, ranks[: segments.outer]
    chunks = chunk_sizes(segments.count, ranks, segments.outer_block)
    if any(chunk % together for chunk in chunks):
        return dim.outer, Cut()
    steps = tuple(chunk // together for chunk in chunks)
    return dim.outer, Cut(block=block_of(extents[dim.outer], ranks, steps) or 1)


def _within(
    dim: Dim, segments: Segments, left: int, ranks: tuple[int, ...], extents: dict[str, int]
) -> Cut:
    """Finds the cut of the factor of `dim` within `left` segments of its steps."""
    inner, rest = divmod(extents[dim.factor or ""], left)
    if rest:
        return Cut()
    ranks = ranks[segments.outer :]
    wanted = chunk_sizes(inner * dim.block, ranks, segments.block)
    if any(size % dim.block for size in wanted):
        return Cut(count=left)
    block = block_of(inner, ranks, tuple(size // dim.block for size in wanted))
    return Cut(block=block or 1, count=left)


def between_segments(plain: Cut, ranks: tuple[int, ...], extent: int, other: Cut) -> Cut | None:
    """Cuts the segments of `other`, a cut within segments, as `plain` does.

    `plain` has the cut by axes of `ranks`. None if it is not between the segments of `other`.

    Example:
        >>> cut = between_segments(Cut(("data",), 6), (2,), 24, Cut(count=4))
        >>> cut.outer, cut.outer_block
        (('data',), 1)
    """
    if other.count == 1 or other.number_of_outer:
        return None
    if plain.count == other.count and plain.number_of_outer == len(plain.axes):
        return attrs.evolve(other, outer=plain.outer, outer_block=plain.outer_block)
    if plain.count > 1 or extent % other.count:
        return None
    segments = in_segments(extent, ranks, plain.block, other.count)
    if segments is None or segments.outer < len(ranks):
        return None
    outer = tuple(dict.fromkeys((*plain.axes, *other.outer)))
    together = other.outer_block if other.outer else segments.outer_block
    return attrs.evolve(other, outer=outer, outer_block=together)
