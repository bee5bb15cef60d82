"""Random operators: each rank draws the values of one device, and keeps its part."""

from typing import Any

import torch

from shardcore.adapters import torch_compat
from shardcore.adapters.slices.tensor import Slice, cut, whole, without_pending
from shardcore.adapters.slices.writes import write

aten = torch.ops.aten


def _whole_like(tensor: Slice) -> torch.Tensor:
    """A plain tensor as `tensor` would be on one device, its values not set."""
    return torch.empty_strided(
        tuple(tensor.shape), tensor.stride(), dtype=tensor.dtype, device=tensor.device
    )


def _sliced(value: torch.Tensor, like: Slice) -> Slice:
    """`value`, plain and equal on all ranks, in the layout of `like`, where nothing is pending."""
    layout = without_pending(like.mesh_layout)
    return Slice(cut(value, layout, like.world).clone(), layout, tuple(value.shape), like.world)


def _fill(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """`x.uniform_()` and its kind: the values of one device, of which each rank keeps its part."""
    target, *numbers = args
    value = operator(_whole_like(target), *numbers, **kwargs)
    return write(aten.copy_.default, (target, value), {})


def _draw_like(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """`rand_like(x)` and its kind."""
    like, *numbers = args
    return _sliced(operator(_whole_like(like), *numbers, **kwargs), like)


def _bernoulli(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """`torch.bernoulli(p)`: the operand holds a probability per element."""
    probabilities, *rest = args
    return _sliced(operator(whole(probabilities), *rest, **kwargs), probabilities)


HANDLERS: dict[Any, torch_compat.Handler] = {
    aten.bernoulli.default: _bernoulli,
    **dict.fromkeys(
        (
            aten.bernoulli_.float,
            aten.cauchy_.default,
            aten.exponential_.default,
            aten.geometric_.default,
            aten.log_normal_.default,
            aten.normal_.default,
            aten.uniform_.default,
        ),
        _fill,
    ),
    **dict.fromkeys(
        (
            aten.rand_like.default,
            aten.randn_like.default,
            aten.randint_like.default,
            aten.randint_like.low_dtype,
            aten.normal_functional.default,
        ),
        _draw_like,
    ),
}
