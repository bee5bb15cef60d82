"""Placements in the words of the domain, and in those of DTensor; what is pending, reduced."""

from typing import Any, cast

from torch.distributed.tensor import DTensor
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


def splits(placement: Placement, dim: int) -> bool:
    """Whether `placement` splits `dim`. `is_shard` says no of what a reshape left in strides."""
    return getattr(placement, "dim", None) == dim


def is_strided(placement: Placement) -> bool:
    """Whether `placement` splits a dim in strides, as a reshape or an order of axes leaves it."""
    return not placement.is_shard() and getattr(placement, "dim", None) is not None


def is_pending(tensor: Any) -> bool:
    """Whether `tensor` is a pending reduction."""
    return isinstance(tensor, DTensor) and any(p.is_partial() for p in tensor.placements)


def settled_placements(tensor: DTensor) -> list[Placement]:
    """Those of `tensor`, replicated where it is pending."""
    return [Replicate() if p.is_partial() else p for p in tensor.placements]


def settled(tensor: Any) -> Any:
    """`tensor` with each pending reduction done by an all-reduce; what is not pending as it is."""
    if not is_pending(tensor):
        return tensor
    return tensor.redistribute(placements=settled_placements(tensor))
