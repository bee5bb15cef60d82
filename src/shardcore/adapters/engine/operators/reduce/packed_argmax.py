"""Argmax along a split dim: each rank sends one number a row.

The upper half of the number grows with the value, its lower half falls with the index. So the
maximum over the ranks belongs to the largest value, and of equal values to the first.
"""

from typing import Any

import torch

from shardcore.adapters.engine.moves.redistribution import in_layout, reduced
from shardcore.domain.layout import Layout

# Floats that float32 represents exactly; its bits are half of such a number.
SERVED = (torch.float32, torch.bfloat16, torch.float16)

_LEAST = torch.iinfo(torch.int64).min
_HALF = 1 << 32
_SIGN = 0x7FFFFFFF


def packed(part: torch.Tensor, numbers: torch.Tensor, dim: int) -> torch.Tensor:
    """Returns the number of each row of `part`, this rank's values, which may be empty.

    `numbers` has their indices along the full dim; `dim` stays, with one entry.
    """
    if not part.shape[dim]:
        return torch.full_like(part.sum(dim, keepdim=True), _LEAST, dtype=torch.int64)
    values, places = part.float().max(dim, keepdim=True)
    return _ordered(values) * _HALF + (_HALF - 1 - numbers[places])


def places(found: torch.Tensor) -> torch.Tensor:
    """Returns the argmax of each row from the largest number of all ranks."""
    return _HALF - 1 - (found & (_HALF - 1))


def _ordered(values: torch.Tensor) -> torch.Tensor:
    """Returns integers in the order of `values`; nan is the largest, as in torch."""
    full = values + 0.0  # minus zero is zero
    bits = full.view(torch.int32).to(torch.int64)
    ordered = torch.where(bits < 0, bits ^ _SIGN, bits)
    return ordered.masked_fill(values.isnan(), _SIGN)


def argmax(_operator: Any, x: Any, dim: int, keep: bool = False) -> Any:
    """Runs `argmax(x, dim, keepdim)` along a split dim, in one all-reduce."""
    x, dim = reduced(x), dim % x.ndim
    engine, layout = x.engine, x.form.layout
    axes = layout.dim_axes(dim)
    numbers = engine.replicated(torch.arange(x.shape[dim], device=x.device))
    own = in_layout(numbers, Layout(layout.mesh, (axes,), (), (layout.blocks[dim],))).part
    rest = layout.without(*axes)
    pending = Layout(layout.mesh, rest.spec, dict.fromkeys(axes, "max"), rest.blocks)
    shape = (*x.shape[:dim], 1, *x.shape[dim + 1 :])
    largest = reduced(engine.sharded(packed(x.part, own, dim), pending, shape))
    found = engine.sharded(places(largest.part), largest.form.layout, shape)
    return found if keep else found.squeeze(dim)
