"""The rank of a host that reads a part of a file, so that a host reads each byte once."""

from collections.abc import Iterable, Mapping

import attrs

from shardcore.domain.checkpoints.grid import Box


@attrs.frozen
class HostRead:
    """A part of a tensor in a file that one rank of a host reads.

    Args:
        box: The part.
        reader: The rank that reads it.
        ranks: The ranks that need it, in ascending order; the reader is one of them.
    """

    box: Box
    reader: int
    ranks: tuple[int, ...]


@attrs.frozen
class HostReads:
    """Chooses the reader of each part: of the ranks that need it the one with the fewest elements.

    All ranks of a host choose alike, since they plan the same tensors in the same order.

    Example:
        >>> reads, left, right = HostReads(), Box((0,), (2,)), Box((2,), (2,))
        >>> [(read.reader, read.ranks) for read in reads.plan({0: [left], 1: [left, right]})]
        [(0, (0, 1)), (1, (1,))]
        >>> [read.reader for read in reads.plan({0: [left], 1: [left]})]
        [0]
    """

    _elements: dict[int, int] = attrs.field(factory=dict, init=False)

    def plan(self, needs: Mapping[int, Iterable[Box]]) -> list[HostRead]:
        """Lists the reads for the boxes that each rank of the host needs; two do not overlap."""
        ranks_of: dict[Box, dict[int, None]] = {}
        for rank in sorted(needs):
            for box in needs[rank]:
                ranks_of.setdefault(box, {})[rank] = None
        reads = []
        for box, ranks in ranks_of.items():
            reader = min(ranks, key=lambda rank: (self._elements.get(rank, 0), rank))
            self._elements[reader] = self._elements.get(reader, 0) + box.elements
            reads.append(HostRead(box, reader, tuple(ranks)))
        return reads
