"""What splits a dim in strides: a `_StridedShard`, of an order of mesh axes or left by a view."""

import math
from collections.abc import Iterator

import attrs
from torch.distributed.tensor._dtensor_spec import DTensorSpec
from torch.distributed.tensor.placement_types import Placement, Shard, _StridedShard


def tell_views(*specs: DTensorSpec) -> None:
    """Say of each spec whose `_StridedShard`s are no order of axes that a view has left them.

    torch 2.13: a spec that is made of placements takes them for an order, and only the rules of
    views say otherwise. What is no order is then redistributed axis by axis, which gives other
    values where two axes split one dim and one of them is gathered:
    `k.reshape(4, 8).redistribute([Replicate(), _StridedShard(1, 2)])` for a `k` of shape (4, 2, 4)
    in `[Shard(2), Shard(2)]`.
    """
    for spec in specs:
        if not spec.use_strided_shard_as_shard_order:
            continue
        if spec._maybe_convert_StridedShard_to_shard_order(spec.placements, spec.mesh) is None:
            spec.use_strided_shard_as_shard_order = False
            spec.shard_order = spec.compute_default_shard_order(spec.placements)


def cuts_alike(one: DTensorSpec, other: DTensorSpec) -> bool:
    """Whether each rank has of a view what it has of the tensor that is viewed, in one order.

    Axis by axis: each cuts what those before it have left to a rank.
    """
    if not math.prod(one.shape):
        return True
    shapes = {(tuple(one.shape), tuple(other.shape))}
    for ranks, *placements in zip(one.mesh.shape, one.placements, other.placements, strict=True):
        left: set[tuple[tuple[int, ...], tuple[int, ...]]] = set()
        for pair in shapes:
            own, others = (_cut(*each, ranks) for each in zip(pair, placements, strict=True))
            if (own and own.pattern) != (others and others.pattern):
                return False
            if own is None or others is None:
                left.add(pair)
            else:
                left.update(zip(own.left(), others.left(), strict=True))
        shapes = {pair for pair in left if math.prod(pair[0])}
    return True


def _cut(shape: tuple[int, ...], placement: Placement, ranks: int) -> "_Cut | None":
    """How an axis cuts what is left; None if it does not."""
    if ranks == 1:
        return None
    if isinstance(placement, _StridedShard):
        return _Cut(shape, placement.dim, int(placement.split_factor), ranks)
    return _Cut(shape, placement.dim, 1, ranks) if isinstance(placement, Shard) else None


@attrs.frozen
class _Cut:
    """How one axis cuts a tensor: a dim is cut into pieces, and each is dealt out to the ranks.

    Args:
        shape: Of the tensor.
        dim: The dim.
        pieces: How many; one for a `Shard`.
        ranks: Of the axis.
    """

    shape: tuple[int, ...]
    dim: int
    pieces: int
    ranks: int

    @property
    def pattern(self) -> tuple[int, ...]:
        """What is alike where the same elements go to each rank, however dims are told.

        So many blocks of so many elements, of which so many go to the first rank, and so on.
        """
        size, inner = self.shape[self.dim], math.prod(self.shape[self.dim + 1 :])
        blocks, piece = math.prod(self.shape[: self.dim]) * self.pieces, _chunk(size, self.pieces)
        if size % self.pieces:  # blocks of several sizes: alike where all is
            return blocks, self.pieces, size, inner, self.ranks
        return blocks, piece * inner, _chunk(piece, self.ranks) * inner

    def left(self) -> Iterator[tuple[int, ...]]:
        """The shape that is left to each rank."""
        size = self.shape[self.dim]
        piece = _chunk(size, self.pieces)
        whole, rest = divmod(size, piece)
        for rank in range(self.ranks):
            part = whole * _part(piece, self.ranks, rank) + _part(rest, self.ranks, rank)
            yield *self.shape[: self.dim], part, *self.shape[self.dim + 1 :]


def _chunk(size: int, parts: int) -> int:
    """The size of all parts but the last ones."""
    return -(-size // parts)


def _part(size: int, parts: int, rank: int) -> int:
    chunk = _chunk(size, parts)
    return min(max(size - rank * chunk, 0), chunk)
