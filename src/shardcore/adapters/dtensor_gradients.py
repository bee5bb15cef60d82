"""Gradients of DTensors, which are reduced together or brought into their variable's layout."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Partial, Placement, Replicate

from shardcore.adapters.dtensor_placements import is_pending, settled, settled_placements
from shardcore.adapters.gradient_buckets import Buckets
from shardcore.adapters.torch_compat import dtensor as dtensor_compat


def bring(parameter: torch.Tensor, placements: Sequence[Placement], waiting: Buckets) -> None:
    """Bring the gradient of `parameter` into `placements`, by the end of the backward pass."""
    gradient = parameter.grad
    if not isinstance(gradient, DTensor) or gradient.placements == tuple(placements):
        return
    with torch.no_grad():
        gradient = parameter.grad = _cut(gradient, placements)
        if _is_summed_whole(gradient, placements):
            part = dtensor_compat.local_tensor(gradient)
            alike = gradient.device_mesh, _sums(gradient), gradient.dtype
            moves = sum(placement.is_partial() for placement in alike[1])
            waiting.add(parameter, alike, part.numel() * part.element_size(), moves)
        else:
            parameter.grad = gradient.redistribute(placements=placements)


def contiguous(gradient: Any) -> Any:
    """A pending `gradient` as the variables lie, so that torch keeps it.

    torch copies any other into a tensor made in its likeness. That is whole, so each gradient would
    be reduced by itself.
    """
    if not is_pending(gradient) or gradient.is_contiguous():
        return gradient
    return _with_part(gradient, dtensor_compat.local_tensor(gradient), gradient.placements)


def start(gradients: Sequence[Any]) -> Callable[[], Sequence[DTensor]]:
    """Start to sum gradients that are pending over the same axes."""
    if len(gradients) == 1:
        return _start_one(gradients[0])
    parts = [dtensor_compat.local_tensor(each) for each in gradients]
    flat = torch.cat([part.reshape(-1) for part in parts])
    mesh, placements = gradients[0].device_mesh, _sums(gradients[0])
    summed = settled(DTensor.from_local(flat, mesh, placements, run_check=False)).to_local()

    def wait() -> Sequence[DTensor]:
        found = torch.split(summed, [part.numel() for part in parts])
        return [
            _with_part(each, part, settled_placements(each))
            for each, part in zip(gradients, found, strict=True)
        ]

    return wait


def _start_one(gradient: DTensor) -> Callable[[], Sequence[DTensor]]:
    part = dtensor_compat.local_tensor(gradient)
    alone = DTensor.from_local(part, gradient.device_mesh, _sums(gradient), run_check=False)
    summed = settled(alone).to_local()
    return lambda: [_with_part(gradient, summed, settled_placements(gradient))]


def _cut(gradient: DTensor, target: Sequence[Placement]) -> DTensor:
    """`gradient`, cut where it is whole and `target` is split: fewer bytes are then summed."""
    placements = [
        after if isinstance(before, Replicate) else before
        for before, after in zip(gradient.placements, target, strict=True)
    ]
    return gradient.redistribute(placements=placements)


def _is_summed_whole(gradient: DTensor, target: Sequence[Placement]) -> bool:
    """Whether `gradient` has nothing but a pending sum between it and `target`."""
    return is_pending(gradient) and all(
        before == after or (before.is_partial("sum") and isinstance(after, Replicate))
        for before, after in zip(gradient.placements, target, strict=True)
    )


def _sums(gradient: DTensor) -> tuple[Placement, ...]:
    """Those of its placements that are pending; of the others each rank has its own part."""
    return tuple(Partial() if p.is_partial() else Replicate() for p in gradient.placements)


def _with_part(gradient: DTensor, part: torch.Tensor, placements: Sequence[Placement]) -> DTensor:
    """`gradient`, without gaps, with other values in the same local shape."""
    shape = dtensor_compat.local_tensor(gradient).shape
    return DTensor.from_local(
        part.reshape(shape).contiguous(),
        gradient.device_mesh,
        placements,
        run_check=False,
        shape=gradient.shape,
        stride=torch.empty(gradient.shape, device="meta").stride(),
    )
