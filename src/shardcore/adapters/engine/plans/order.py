"""The order in which the dims of a tensor lie in memory."""

import torch

from shardcore.adapters.engine.tensor import contiguous_strides

Order = tuple[int, ...]


def strides_in(order: Order, shape: tuple[int, ...]) -> tuple[int, ...]:
    """The strides of a tensor without gaps whose dims lie in memory in `order`."""
    in_memory = contiguous_strides(tuple(shape[dim] for dim in order))
    by_dim = dict(zip(order, in_memory, strict=True))
    return tuple(by_dim[dim] for dim in range(len(shape)))


def in_order(part: torch.Tensor, order: Order | None) -> torch.Tensor:
    """`part` without gaps, its dims in memory in `order`."""
    if order is None:
        return part.contiguous()
    inverse = sorted(range(len(order)), key=order.__getitem__)
    return part.permute(order).contiguous().permute(inverse)
