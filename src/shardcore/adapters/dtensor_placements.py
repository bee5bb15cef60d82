"""Placements in the words of the domain, and in those of DTensor."""

from typing import Any, cast

from torch.distributed.tensor.placement_types import Partial, Placement, Replicate, Shard

from shardcore.domain import placements as domain


def to_torch(placement: domain.Placement) -> Placement:
    """The DTensor placement of the same meaning."""
    match placement:
        case domain.Shard(dim):
            return Shard(dim)
        case domain.Partial(op):
            return Partial(op)
        case _:
            return Replicate()


def from_torch(placement: Placement) -> domain.Placement:
    """The same in the words of the domain. What a reshape left in strides is split as well."""
    dim: Any = getattr(placement, "dim", None)
    if dim is not None:
        return domain.Shard(dim)
    if isinstance(placement, Partial):
        return domain.Partial(cast(domain.ReduceOp, placement.reduce_op))
    return domain.Replicate()
