"""Placements of a tensor along one mesh axis: replicated, sharded by one dim, or partial."""

from operator import index
from typing import Literal, TypeAlias, get_args

import attrs

from shardcore.domain.errors import LayoutError

ReduceOp: TypeAlias = Literal["sum", "avg", "max", "min", "product"]
REDUCE_OPS: tuple[str, ...] = get_args(ReduceOp)


def _dim(value: int) -> int:
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise LayoutError(
            f"Shard takes the number of a tensor dim, got {value!r}.", got=repr(value)
        )
    return index(value)


@attrs.frozen(cache_hash=True)
class Segments:
    """A dim that consists of consecutive segments of one size, each of which is sharded alike.

    4 steps of 6 rows each, flattened to 24 elements, are 4 segments. If the rows are sharded over
    two ranks, each rank has 3 elements of every segment. torch calls this a strided shard. If the
    steps are sharded too, by another axis, each rank has 3 elements of each of its 2 segments.

    Args:
        count: The number of segments, 2 or more.
        block: The elements of a block. A segment is sharded between blocks only.
        outer: The first `outer` axes that shard the dim distribute the segments among their ranks.
            The other axes shard inside each segment (ADR 50).
        outer_block: The number of consecutive segments that stay on one rank.
    """

    count: int
    block: int = 1
    outer: int = 0
    outer_block: int = 1

    def __str__(self) -> str:
        if not self.outer:
            return f"{self.count} x {self.block}"
        axes = "1 axis" if self.outer == 1 else f"{self.outer} axes"
        together = "" if self.outer_block == 1 else f", {self.outer_block} together"
        return f"{self.count} (over {axes}{together}) x {self.block}"


Blocks: TypeAlias = int | Segments


def blocks_of(count: int, block: int) -> Blocks:
    """Writes one segment as its elements in a block, and several as `Segments`."""
    return block if count == 1 else Segments(count, block)


def segments_of(blocks: Blocks) -> Segments:
    """Inverts `blocks_of`: a number of elements is the block of one segment."""
    return Segments(1, blocks) if isinstance(blocks, int) else blocks


def _blocks(value: Blocks) -> Blocks:
    if isinstance(value, Segments):
        return value
    if isinstance(value, bool) or not hasattr(value, "__index__") or index(value) < 1:
        raise LayoutError(f"A block is 1 or more elements, got {value!r}.", got=repr(value))
    return index(value)


@attrs.frozen
class Replicate:
    """Every rank along the axis holds the same values."""

    def __str__(self) -> str:
        return "R"


@attrs.frozen
class Shard:
    """The ranks along the axis hold consecutive chunks of tensor dim `dim`.

    Args:
        dim: The tensor dim that is sharded. A negative one counts from the end.
        block: The elements of a block, or `Segments`. The dim is sharded between blocks only: 5
            rows of 4 steps, flattened to 20 elements, are sharded into 12 and 8, in blocks of 4.

    Raises:
        LayoutError: If `dim` is not an integer, or `block` is less than 1.
    """

    dim: int = attrs.field(converter=_dim)
    block: Blocks = attrs.field(default=1, converter=_blocks)

    def __str__(self) -> str:
        return f"S({self.dim})" if self.block == 1 else f"S({self.dim}, block={self.block})"


@attrs.frozen
class Partial:
    """The ranks along the axis hold partial values: their reduction is the tensor.

    Args:
        op: The reduction: "sum", "avg", "max", "min" or "product".

    Raises:
        LayoutError: If `op` is none of these.
    """

    op: ReduceOp = "sum"

    def __attrs_post_init__(self) -> None:
        if self.op not in REDUCE_OPS:
            raise LayoutError(
                f"Unknown reduction {self.op!r}: give one of {REDUCE_OPS}.", name=self.op
            )

    def __str__(self) -> str:
        return f"P({self.op})"


Placement: TypeAlias = Replicate | Shard | Partial
