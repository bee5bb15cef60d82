"""Random operators: each rank draws the values of one device, and keeps its shard (ADR 12)."""

from typing import Any

import torch

from shardcore.adapters.engine.redistribution import full, in_layout, local_shard
from shardcore.adapters.engine.task import Handler, Operator, by_operator
from shardcore.adapters.engine.tensor import ShardedTensor
from shardcore.adapters.engine.writes import write
from shardcore.adapters.torch_private import tree_map_only

aten = torch.ops.aten


def _full_like(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(
        tuple(tensor.shape), tensor.stride(), dtype=tensor.dtype, device=tensor.device
    )


def _shard_like(value: torch.Tensor, like: ShardedTensor) -> Any:
    layout = like.form.layout.reduced
    part = local_shard(value, layout, like.engine)
    return like.engine.sharded(part.clone(), layout, tuple(value.shape))


def _fill(operator: Operator, target: torch.Tensor, *rest: object, **kwargs: object) -> Any:
    numbers, named = tree_map_only(ShardedTensor, full, (rest, kwargs))
    value = operator(_full_like(target), *numbers, **named)
    return write(aten.copy_.default, target, value)


def _draw_like(operator: Operator, like: ShardedTensor, *numbers: object, **kwargs: object) -> Any:
    return _shard_like(operator(_full_like(like), *numbers, **kwargs), like)


def _bernoulli(
    operator: Operator, probabilities: ShardedTensor, *rest: object, **kwargs: object
) -> Any:
    return _shard_like(operator(full(probabilities), *rest, **kwargs), probabilities)


def _dropout(operator: Operator, tensor: ShardedTensor, *numbers: object) -> Any:
    """Runs `native_dropout`, which CUDA uses: the result and its mask."""
    scale, mask = operator(torch.ones_like(_full_like(tensor)), *numbers)
    return tensor * _shard_like(scale, tensor), _shard_like(mask, tensor)


def _multinomial(
    operator: Operator, weights: ShardedTensor, *rest: object, **kwargs: object
) -> Any:
    drawn = weights.engine.replicated(operator(full(weights), *rest, **kwargs))
    if weights.ndim != 2:
        return drawn
    layout = weights.form.layout.reduced
    return in_layout(drawn, layout.without(*layout.dim_axes(1)))


_FILLS = "bernoulli_ cauchy_ exponential_ geometric_ log_normal_ normal_ random_ uniform_"

HANDLERS: dict[Any, Handler] = {
    **by_operator(
        {
            "bernoulli": _bernoulli,
            "multinomial": _multinomial,
            "native_dropout": _dropout,
            "rand_like randn_like normal_functional": _draw_like,
            "randint_like randint_like.low_dtype": _draw_like,
        }
    ),
    **{
        getattr(packet, overload): _fill
        for packet in (getattr(aten, name) for name in _FILLS.split())
        for overload in packet.overloads()
    },
}
