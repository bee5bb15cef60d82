"""The exchange of elements of a dim that no placement describes.

A rank may hold or want parts of several segments, or a slice that begins anywhere.
"""

from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from itertools import accumulate, groupby, islice, pairwise
from typing import ClassVar, TypeAlias

import attrs

Ranges: TypeAlias = tuple[range, ...]
# Parts of a shard, each with its position in what a rank wants.
Parts: TypeAlias = tuple[tuple[int, slice], ...]
# The owner and the size of each part.
Owned: TypeAlias = tuple[tuple[int, int], ...]


@attrs.frozen
class Exchange:
    """A step in which each rank along an axis gets elements of a dim from other ranks.

    Example:
        >>> halves = (range(0, 3),), (range(3, 6),)
        >>> shifted = Exchange("model", 0, halves, ((range(1, 4),), (range(4, 6),)))
        >>> shifted.slices_for(1, 0), shifted.owners_of(0), shifted.is_local
        ((slice(0, 1, None),), ((0, 2), (1, 1)), False)
    """

    kind: ClassVar = "exchange"

    axis: str
    dim: int
    held: tuple[Ranges, ...]  # for each rank along the axis, the elements that it holds
    # For each rank, the elements that it gets. Some rank holds each of them.
    wanted: tuple[Ranges, ...]
    # What is computed once: an eager step asks each time.
    _parts: dict[tuple[int, int], Parts] = attrs.field(factory=dict, init=False, eq=False)
    _strided: dict[tuple[int, int], "Strided | None"] = attrs.field(
        factory=dict, init=False, eq=False
    )
    _turns: dict[int, tuple[Owned, int]] = attrs.field(factory=dict, init=False, eq=False)

    @cached_property
    def is_local(self) -> bool:
        """Whether each rank holds all that it wants, so that nothing is sent."""
        return all(
            owner == position
            for position in range(len(self.held))
            for owner, _ in self.owners_of(position)
        )

    def slices_for(self, position: int, peer: int) -> tuple[slice, ...]:
        """Lists the slices of the shard at `position` that `peer` wants, in its order."""
        return tuple(_merge_adjacent(part for _, part in self._common(position, peer)))

    def strided(self, position: int, peer: int) -> "Strided | None":
        """The same slices as one, if they are regular."""
        if (position, peer) not in self._strided:
            self._strided[position, peer] = Strided.of(self.slices_for(position, peer))
        return self._strided[position, peer]

    def owners_of(self, position: int) -> Owned:
        """Lists the owner and the size of each part that `position` wants, in order."""
        parts = sorted(
            (at, owner, part.stop - part.start)
            for owner in range(len(self.held))
            for at, part in self._common(owner, position)
        )
        of_owners = groupby(parts, key=lambda part: part[1])
        return tuple((owner, sum(size for _, _, size in run)) for owner, run in of_owners)

    def turns(self, position: int) -> tuple[Owned, int]:
        """Finds the shortest beginning of `owners_of` that repeats, and how often it does."""
        if position not in self._turns:
            parts = self.owners_of(position)
            length = _cycle_length(parts)
            self._turns[position] = parts[:length], len(parts) // max(length, 1)
        return self._turns[position]

    def _common(self, owner: int, position: int) -> Parts:
        if (owner, position) not in self._parts:
            parts = _common(self.held[owner], self.wanted[position])
            self._parts[owner, position] = tuple(sorted(parts, key=lambda part: part[0]))
        return self._parts[owner, position]


def _common(held: Ranges, wanted: Ranges) -> Iterator[tuple[int, slice]]:
    """Yields the parts that both have: the position of each in `wanted`, its slice of `held`."""
    ours, at = _in_order(held), 0
    for first, one in _in_order(wanted):
        while at < len(ours) and ours[at][1].stop <= one.start:
            at += 1
        for start, other in islice(ours, at, None):
            if other.start >= one.stop:
                break
            begin, end = max(one.start, other.start), min(one.stop, other.stop)
            offset = start - other.start
            yield first + begin - one.start, slice(begin + offset, end + offset)


def _merge_adjacent(slices: Iterable[slice]) -> Iterator[slice]:
    """Yields the slices, as one where one begins at the end of another."""
    before = slice(0, 0)
    for piece in slices:
        if piece.start == before.stop:
            before = slice(before.start, piece.stop)
            continue
        if before.stop > before.start:
            yield before
        before = piece
    if before.stop > before.start:
        yield before


def _in_order(ranges: Ranges) -> list[tuple[int, range]]:
    """Sorts the ranges that have elements by their elements, each with its position."""
    starts = accumulate(map(len, ranges[:-1]), initial=0)
    with_starts = (
        (start, elements) for start, elements in zip(starts, ranges, strict=False) if elements
    )
    return sorted(with_starts, key=lambda pair: pair[1].start)


@attrs.frozen
class Strided:
    """Slices of one size at equal distances.

    Args:
        start: The start of the first.
        size: The size of each.
        step: From the start of one to that of the next.
        count: Their number.
    """

    start: int
    size: int
    step: int
    count: int

    @classmethod
    def of(cls, slices: Sequence[slice]) -> "Strided | None":
        """Merges slices into one, None if they differ in size or in distance, or overlap.

        Example:
            >>> Strided.of([slice(1, 3), slice(5, 7), slice(9, 11)])
            Strided(start=1, size=2, step=4, count=3)
            >>> Strided.of([slice(1, 3), slice(5, 7), slice(8, 10)]) is None
            True
        """
        if not slices:
            return None
        sizes = {piece.stop - piece.start for piece in slices}
        steps = {after.start - before.start for before, after in pairwise(slices)} or sizes
        size, step = min(sizes), min(steps)
        if len(sizes) > 1 or len(steps) > 1 or step < size:
            return None
        return cls(slices[0].start, size, step, len(slices))


def _cycle_length(items: Sequence[object]) -> int:
    """Finds the length of the shortest beginning that repeats to give all items.

    Example:
        >>> _cycle_length("abab"), _cycle_length("aba"), _cycle_length("aaa"), _cycle_length("")
        (2, 3, 1, 0)
    """
    count = len(items)
    lengths = (n for n in range(1, count + 1) if count % n == 0)
    return next((n for n in lengths if items[n:] == items[:-n]), 0)
