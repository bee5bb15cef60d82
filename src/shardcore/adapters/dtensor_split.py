"""An operator run on each rank's parts, as a rule of the domain says."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Placement, Replicate

from shardcore.adapters import fallback
from shardcore.adapters.dtensor_placements import from_torch, to_torch
from shardcore.adapters.split_operators import Parts, Shapes
from shardcore.domain import placements as domain
from shardcore.domain.operator_rules import OperatorRule
from shardcore.domain.operator_rules_choice import Placed, Split, split


def run_split(
    operator: Any,
    rule: OperatorRule,
    operands: Sequence[torch.Tensor],
    call: Callable[[Parts], Sequence[torch.Tensor | None]],
    result_shapes: Shapes = (),
) -> tuple[DTensor | None, ...]:
    """`split_operators.RunSplit` for DTensors."""
    mesh = next(each.device_mesh for each in operands if isinstance(each, DTensor))
    with torch.no_grad():
        tensors = [_promoted(each, mesh) for each in operands]
        chosen = choose(operator, rule, tensors, result_shapes)
        pairs = zip(tensors, chosen.operands, strict=True)
        parts = call([_part(tensor, placements) for tensor, placements in pairs])
        shape, at = tuple(mesh.shape), _coordinate(mesh)
        return tuple(
            part
            if part is None
            else _joined(
                part,
                mesh,
                [to_torch(placement) for placement in placements],
                chosen.global_shape(result, tuple(part.shape), shape, at),
            )
            for part, result, placements in zip(parts, rule.results, chosen.results, strict=True)
        )


def choose(
    operator: Any, rule: OperatorRule, tensors: Sequence[DTensor], result_shapes: Shapes = ()
) -> Split:
    """The split that `rule` allows; it is told if an operand has to be gathered for it."""
    mesh = tensors[0].device_mesh
    chosen = split(rule, tuple(mesh.shape), tuple(map(_placed, tensors)), result_shapes)
    if chosen.gathers:
        fallback.tell(operator, tensors)
    return chosen


def brought(tensor: DTensor, placements: Sequence[domain.Placement]) -> DTensor:
    """`tensor` in `placements`."""
    with torch.no_grad():
        return tensor.redistribute(placements=[to_torch(each) for each in placements])


def _promoted(tensor: torch.Tensor, mesh: DeviceMesh) -> DTensor:
    if isinstance(tensor, DTensor):
        return tensor
    return DTensor.from_local(tensor, mesh, [Replicate()] * mesh.ndim, run_check=False)


def _coordinate(mesh: DeviceMesh) -> tuple[int, ...]:
    return tuple(mesh.get_local_rank(axis) for axis in range(mesh.ndim))


def _placed(tensor: DTensor) -> Placed:
    return Placed(
        tuple(tensor.shape), tuple(map(from_torch, tensor.placements)), tensor.element_size()
    )


def _part(tensor: DTensor, placements: Sequence[domain.Placement]) -> torch.Tensor:
    """This rank's part of `tensor` in `placements`. Of a new pending sum the first has all."""
    axes = [
        axis
        for axis, (source, target) in enumerate(zip(tensor.placements, placements, strict=True))
        if isinstance(target, domain.Partial) and source != to_torch(target)
    ]
    whole = [
        domain.Replicate() if axis in axes else target for axis, target in enumerate(placements)
    ]
    part = brought(tensor, whole).to_local()
    first = all(tensor.device_mesh.get_local_rank(axis) == 0 for axis in axes)
    return part if first else torch.zeros_like(part)


def _joined(
    part: torch.Tensor, mesh: DeviceMesh, placements: Sequence[Placement], shape: Sequence[int]
) -> DTensor:
    """The DTensor of global `shape`. Its strides are those that the operator gave its part."""
    order = sorted(range(part.ndim), key=lambda dim: (-part.stride()[dim], dim))
    stride, step = [0] * part.ndim, 1
    for dim in reversed(order):
        stride[dim] = step
        step *= shape[dim]
    return DTensor.from_local(
        part, mesh, placements, run_check=False, shape=torch.Size(shape), stride=tuple(stride)
    )
