"""Random operators on DTensors: the values are those of one device.

DTensor draws each shard for itself: on CPU every shard gets the same values, on CUDA others than
one device would draw. Here each rank draws the whole from torch's generator, which is in the same
state on all ranks, and keeps its part. That costs each rank the drawing of the whole.
"""

from typing import Any

import torch
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor

from shardcore.adapters import fallback, torch_compat
from shardcore.adapters.dtensor_placements import settled_placements, splits
from shardcore.adapters.dtensor_trust import any_split, store, whole
from shardcore.adapters.torch_compat import dtensor as dtensor_compat

aten = torch.ops.aten


def _whole_like(tensor: DTensor) -> torch.Tensor:
    """A plain tensor as `tensor` would be on one device, its values not set."""
    return torch.empty_strided(
        tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device
    )


def _part(value: torch.Tensor, like: DTensor) -> DTensor:
    """`value`, equal on all ranks, in the placements of `like`; pending ones are replicated."""
    placements = settled_placements(like)
    return distribute_tensor(value, like.device_mesh, placements, src_data_rank=None)


def _fill(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """`x.uniform_()` and its kind: the first operand is overwritten."""
    tensor, *rest = args
    rest, kwargs = torch_compat.tree_map_only(DTensor, whole, (rest, kwargs))
    store(tensor, operator(_whole_like(tensor), *rest, **kwargs))
    return tensor


def _draw_like(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """`rand_like(x)` and its kind: the first operand gives shape and placements."""
    tensor, *numbers = args
    return _part(operator(_whole_like(tensor), *numbers, **kwargs), tensor)


def _bernoulli(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """`torch.bernoulli(p)`: the operand holds a probability per element."""
    (probabilities, *rest) = args
    return _part(operator(probabilities.full_tensor(), *rest, **kwargs), probabilities)


def _dropout(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """`native_dropout(x, p, train)`, which CUDA runs: the result and its mask."""
    tensor, rate, train = args
    scale, mask = operator(torch.ones_like(_whole_like(tensor)), rate, train)
    return tensor * _part(scale, tensor), _part(mask, tensor)


def _multinomial(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """`torch.multinomial(weights, count)`: each row of weights draws so many indices."""
    weights, *rest = args
    rows = [p if weights.ndim == 2 and splits(p, 0) else Replicate() for p in weights.placements]
    drawn = operator(weights.full_tensor(), *rest, **kwargs)
    return distribute_tensor(drawn, weights.device_mesh, rows, src_data_rank=None)


def _random_slope(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """`rrelu_with_noise(x, noise, ...)`: how much is drawn hangs on the values of all of `x`.

    It writes what it draws into `noise`, which its gradient reads.
    """
    if not any_split(args):
        return dtensor_compat.as_torch_does(operator, args, kwargs)
    x, noise, *numbers = args
    fallback.tell(operator, args)
    with torch.no_grad():
        values, drawn = torch_compat.tree_map_only(DTensor, whole, (x, noise))
        result = operator(values, drawn, *numbers, **kwargs)
        store(noise, drawn)
        if not torch_compat.writes_first(operator):
            return _part(result, x)
        store(x, values)
        return x


# Writes in place, which `dtensor_writes` runs.
WRITES: dict[Any, torch_compat.Handler] = {
    aten.bernoulli_.Tensor: _fill,
    aten.bernoulli_.float: _fill,
    aten.cauchy_.default: _fill,
    aten.exponential_.default: _fill,
    aten.geometric_.default: _fill,
    aten.log_normal_.default: _fill,
    aten.normal_.default: _fill,
    aten.random_.default: _fill,
    getattr(aten.random_, "from"): _fill,
    aten.random_.to: _fill,
    aten.rrelu_with_noise_.default: _random_slope,
    aten.uniform_.default: _fill,
}
HANDLERS: dict[Any, torch_compat.Handler] = {
    aten.rand_like.default: _draw_like,
    aten.randn_like.default: _draw_like,
    aten.randint_like.default: _draw_like,
    aten.randint_like.low_dtype: _draw_like,
    aten.normal_functional.default: _draw_like,
    aten.bernoulli.default: _bernoulli,
    aten.multinomial.default: _multinomial,
    aten.native_dropout.default: _dropout,
    aten.rrelu_with_noise.default: _random_slope,
}
