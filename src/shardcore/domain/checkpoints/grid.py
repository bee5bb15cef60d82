"""The pieces in which a checkpoint stores a variable, and those that a rank wants of it.

Every layout divides each dim at some cuts, so the pieces are the cells of a grid: no element is
missing, and none is stored twice (ADR 31).
"""

import math
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate, product
from operator import add

import attrs

from shardcore.domain.engine.exchange import Ranges
from shardcore.domain.engine.segments import ranges_of
from shardcore.domain.errors import CheckpointError, LayoutError
from shardcore.domain.layouts.layout import Layout

_SHOWN = 200  # characters of cuts that are wrong


@attrs.frozen
class Box:
    """A part of a tensor: per dim where it begins, and its size.

    Example:
        >>> Box((0, 4), (2, 3)).slices
        (slice(0, 2, None), slice(4, 7, None))
    """

    start: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def slices(self) -> tuple[slice, ...]:
        """The part as an index."""
        return tuple(slice(at, at + size) for at, size in zip(self.start, self.shape, strict=True))

    @property
    def elements(self) -> int:
        """The number of elements."""
        return math.prod(self.shape)

    @classmethod
    def between(cls, start: tuple[int, ...], ends: Iterable[int]) -> "Box":
        """Builds the box from `start` up to `ends`, which it does not contain."""
        return cls(start, tuple(end - at for end, at in zip(ends, start, strict=True)))

    def within(self, other: "Box") -> "Box":
        """Counts the part from the beginning of `other`, which contains it."""
        begins = (at - base for at, base in zip(self.start, other.start, strict=True))
        return Box(tuple(begins), self.shape)


@attrs.frozen
class HeldPart:
    """A part of a tensor that a rank holds, in the full tensor and in its local shard."""

    full: Box
    local: Box

    def local_box(self, part: Box) -> Box:
        """Converts a part of the full tensor, which this contains, to one of the local shard.

        Example:
            >>> HeldPart(Box((4,), (4,)), Box((0,), (4,))).local_box(Box((5,), (2,)))
            Box(start=(1,), shape=(2,))
        """
        begin = part.within(self.full).start
        start = (at + base for at, base in zip(begin, self.local.start, strict=True))
        return Box(tuple(start), part.shape)


@attrs.frozen
class Grid:
    """The pieces of a tensor: each dim is divided at its cuts.

    Args:
        shape: The global shape.
        cuts: Per dim where pieces begin: 0 first, then in ascending order.

    Raises:
        CheckpointError: If a size is negative, or the cuts are not in order within the shape.

    Example:
        >>> grid = Grid((4, 6), ((0, 2), (0,)))
        >>> [str(box.slices) for box in grid.boxes()][1]
        '(slice(2, 4, None), slice(0, 6, None))'
        >>> [number for number, _ in grid.overlaps(Box((1, 0), (2, 3)))]
        [0, 1]
    """

    shape: tuple[int, ...]
    cuts: tuple[tuple[int, ...], ...]

    def __attrs_post_init__(self) -> None:
        fits = len(self.cuts) == len(self.shape) and all(
            size >= 0 and _ascend(begins, size)
            for size, begins in zip(self.shape, self.cuts, strict=True)
        )
        if not fits:
            raise CheckpointError(
                f"Expected per dim of shape {self.shape} the ascending beginnings of its pieces, "
                f"0 first, got {str(self.cuts)[:_SHOWN]}.",
                got=str(str(self.cuts)[:_SHOWN]),
            )

    @classmethod
    def of(cls, layout: Layout, shape: Iterable[int]) -> "Grid":
        """Cuts each dim where a shard begins under a layout.

        Example:
            >>> from shardcore.domain.layouts.mesh import Mesh
            >>> layout = Layout(Mesh((2,), ("model",)), (None, "model"))
            >>> Grid.of(layout, (3, 5)).cuts
            ((0,), (0, 3))
        """
        sizes = tuple(shape)
        cuts = (
            sorted({0, *(span.start for ranges in _chunks(layout, dim, size) for span in ranges)})
            for dim, size in enumerate(sizes)
        )
        return cls(sizes, tuple(map(tuple, cuts)))

    @property
    def counts(self) -> tuple[int, ...]:
        """The number of pieces along each dim."""
        return tuple(map(len, self.cuts))

    def boxes(self) -> Iterator[Box]:
        """Yields the pieces, those of the last dim first."""
        for numbers in product(*map(range, self.counts)):
            yield self._box(numbers)

    def overlaps(self, wanted: Box) -> Iterator[tuple[int, Box]]:
        """Yields each piece that has elements of `wanted`: its number, and the common part."""
        if not wanted.elements:
            return
        ranges = (
            range(bisect_right(cuts, start) - 1, bisect_left(cuts, start + size))
            for cuts, start, size in zip(self.cuts, wanted.start, wanted.shape, strict=True)
        )
        for numbers in product(*ranges):
            yield self.number(numbers), intersection(self._box(numbers), wanted)

    def number(self, numbers: Iterable[int]) -> int:
        """Converts the numbers of a piece along each dim to its number in the order of `boxes`."""
        number = 0
        for along_dim, count in zip(numbers, self.counts, strict=True):
            number = number * count + along_dim
        return number

    def box(self, number: int) -> Box:
        """Finds the piece of that number, in the order of `boxes`."""
        numbers = []
        for count in reversed(self.counts):
            number, along_dim = divmod(number, count)
            numbers.append(along_dim)
        return self._box(tuple(reversed(numbers)))

    def _box(self, numbers: tuple[int, ...]) -> Box:
        start = tuple(cuts[n] for cuts, n in zip(self.cuts, numbers, strict=True))
        ends = (
            cuts[n + 1] if n + 1 < len(cuts) else size
            for cuts, n, size in zip(self.cuts, numbers, self.shape, strict=True)
        )
        return Box.between(start, ends)


def held_parts(layout: Layout, shape: Iterable[int], rank: int) -> list[HeldPart]:
    """Lists the parts of a tensor that `rank` holds; of a dim in segments, one of each.

    Example:
        >>> from shardcore.domain.layouts.mesh import Mesh
        >>> layout = Layout(Mesh((2,), ("model",)), ("model",))
        >>> [part.full for part in held_parts(layout, (5,), rank=1)]
        [Box(start=(3,), shape=(2,))]
    """
    return _held_parts(layout, [_chunks(layout, dim, size) for dim, size in enumerate(shape)], rank)


def _held_parts(layout: Layout, chunks: Sequence[tuple[Ranges, ...]], rank: int) -> list[HeldPart]:
    dims = []
    for dim, of_dim in enumerate(chunks):
        ranges = of_dim[_chunk_number(layout, dim, rank)]
        begins = accumulate(map(len, ranges), initial=0)
        dims.append([(span, at) for span, at in zip(ranges, begins, strict=False) if span])
    return [
        HeldPart(
            Box(tuple(span.start for span, _ in parts), tuple(len(span) for span, _ in parts)),
            Box(tuple(at for _, at in parts), tuple(len(span) for span, _ in parts)),
        )
        for parts in product(*dims)
    ]


def holders(layout: Layout, grid: Grid) -> list[list[int]]:
    """Lists, for each piece of the layout's grid, the ranks that hold it, in ascending order."""
    chunks = [_chunks(layout, dim, size) for dim, size in enumerate(grid.shape)]  # of all ranks
    ranks_by_piece: list[list[int]] = [[] for _ in grid.boxes()]
    for rank in range(layout.mesh.size):
        for part in _held_parts(layout, chunks, rank):
            for number, _ in grid.overlaps(part.full):
                ranks_by_piece[number].append(rank)
    return ranks_by_piece


def consecutive_runs(
    shape: tuple[int, ...], part: Box, target: tuple[int, ...], target_part: Box
) -> Iterator[tuple[int, int, int]]:
    """Yields the copies of consecutive elements that bring a part of one array to another.

    Both are in row-major order.

    Args:
        shape: The shape of the source.
        part: The part of it.
        target: The shape of the target.
        target_part: Where the part goes.

    Yields:
        Of each copy the offset in the source, that in the target, and the number of elements.

    Example:
        >>> list(consecutive_runs((4, 6), Box((1, 2), (2, 3)), (2, 3), Box((0, 0), (2, 3))))
        [(8, 0, 3), (14, 3, 3)]
        >>> list(consecutive_runs((4, 6), Box((1, 0), (2, 6)), (2, 6), Box((0, 0), (2, 6))))
        [(6, 0, 12)]
    """
    if not part.elements:
        return
    inner = len(shape)  # from this dim on, all of both arrays is copied
    while inner and part.shape[inner - 1] == shape[inner - 1] == target[inner - 1]:
        inner -= 1
    outer = max(inner - 1, 0)
    count = math.prod(part.shape[outer:])
    sources, targets = _offsets(shape, part, outer), _offsets(target, target_part, outer)
    for source, to in zip(sources, targets, strict=True):
        yield source, to, count


def _offsets(shape: tuple[int, ...], part: Box, outer: int) -> Iterator[int]:
    """Yields where the runs of `part` begin, one for each index of its first `outer` dims."""
    strides = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
    first = sum(at * stride for at, stride in zip(part.start, strides, strict=True))
    for numbers in product(*map(range, part.shape[:outer])):
        yield first + sum(n * stride for n, stride in zip(numbers, strides, strict=False))


def _chunks(layout: Layout, dim: int, size: int) -> tuple[Ranges, ...]:
    if layout.partial:
        raise LayoutError(
            f"A checkpoint stores shards and full tensors, but layout {layout} is partial: "
            "redistribute the tensor to Replicate() or Shard(dim) before saving."
        )
    return tuple(tuple(span for span in ranges if span) for ranges in ranges_of(layout, dim, size))


def _chunk_number(layout: Layout, dim: int, rank: int) -> int:
    at = dict(zip(layout.mesh.axis_names, layout.mesh.coordinate(rank), strict=True))
    number = 0
    for axis in layout.dim_axes(dim):
        number = number * layout.mesh.axis_size(axis) + at[axis]
    return number


def _ascend(begins: tuple[int, ...], size: int) -> bool:
    """Tells whether pieces of a dim of `size` elements may begin at `begins`."""
    ends = (*begins[1:], max(size, 1))
    return begins[:1] == (0,) and all(map(int.__lt__, begins, ends))


def intersection(one: Box, other: Box) -> Box:
    """Computes the common part of two boxes; without one, a size in it is not positive."""
    ends = (tuple(map(add, box.start, box.shape)) for box in (one, other))
    return Box.between(tuple(map(max, one.start, other.start)), map(min, *ends))
