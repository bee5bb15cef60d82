"""Operators that DTensor has no rule for, or runs wrongly: what is done instead.

Known for torch 2.13. The last resort is the fall-back: operands are replicated, the operator runs
on each rank, the result is right, and one warning names the operator.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Placement, Replicate, Shard

from shardcore.adapters import (
    dtensor_random,
    dtensor_statistics,
    dtensor_trust,
    fallback,
    torch_compat,
)


def _item(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """`float(x)`, `x.item()`: of the global value. DTensor reads this rank's pending part."""
    return operator(args[0].full_tensor(), **kwargs)


def _attention(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """CPU flash attention, split over batch and heads: every head is on its own.

    Operands: query, key, value of shape (batch, heads, length, size), then numbers; the mask in
    `kwargs` broadcasts over batch and heads. Results: the output, and a log-sum-exp of shape
    (batch, heads, length).
    """
    query, key, value, *numbers = args
    mesh, placements = _batch_and_heads(query, key, value, kwargs)
    local = [_part(tensor, mesh, placements) for tensor in (query, key, value)]
    output, logsumexp = operator(*local, *numbers, **_parts(kwargs, mesh, placements))
    return (
        _joined(output, mesh, placements, (*query.shape[:3], value.shape[3])),
        _joined(logsumexp, mesh, placements, query.shape[:3]),
    )


def _attention_backward(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The gradients of query, key and value; the operands have the shapes of `_attention`."""
    operands, numbers = args[:6], args[6:]
    query, key, value = operands[1:4]
    mesh, placements = _batch_and_heads(query, key, value, (operands, kwargs))
    local = [_part(tensor, mesh, placements) for tensor in operands]
    results = operator(*local, *numbers, **_parts(kwargs, mesh, placements))
    return tuple(
        _joined(result, mesh, placements, operand.shape)
        for result, operand in zip(results, (query, key, value), strict=True)
    )


def _batch_and_heads(
    query: Any, key: Any, value: Any, others: Any
) -> tuple[DeviceMesh, list[Placement]]:
    """The mesh, and the placements of the query as far as they split batch or heads."""
    tensors = (query, key, value)
    first = next(t for t in torch_compat.tree_leaves((tensors, others)) if isinstance(t, DTensor))
    splits = len({tensor.shape[:2] for tensor in tensors}) == 1 and first.ndim == 4
    placements: list[Placement] = [
        placement
        if splits
        and type(placement) is Shard
        and placement.dim < 2
        and first.shape[placement.dim] == query.shape[placement.dim]
        else Replicate()
        for placement in first.placements
    ]
    return first.device_mesh, placements


def _part(tensor: torch.Tensor, mesh: DeviceMesh, placements: list[Placement]) -> torch.Tensor:
    """This rank's part of `tensor`, whole where a split dim is broadcast."""
    if not isinstance(tensor, DTensor):
        tensor = DTensor.from_local(tensor, mesh, [Replicate()] * mesh.ndim, run_check=False)
    fitting = [
        placement
        if isinstance(placement, Shard) and tensor.shape[placement.dim] > 1
        else Replicate()
        for placement in placements
    ]
    return tensor.redistribute(mesh, fitting).to_local()


def _parts(kwargs: dict[str, Any], mesh: DeviceMesh, placements: list[Placement]) -> dict[str, Any]:
    """The mask's part. A mask of (length, length) is one over no batch and no heads."""
    return {
        name: _part(value[(None,) * (4 - value.ndim)], mesh, placements)
        if isinstance(value, torch.Tensor)
        else value
        for name, value in kwargs.items()
    }


def _joined(
    part: torch.Tensor, mesh: DeviceMesh, placements: list[Placement], shape: Sequence[int]
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


OPERATORS = torch_compat.OperatorTable(
    handlers={
        **dtensor_trust.HANDLERS,
        **dtensor_random.HANDLERS,
        **dtensor_statistics.HANDLERS,
        torch_compat.ITEM: _item,
        torch_compat.CPU_ATTENTION: _attention,
        torch_compat.CPU_ATTENTION_BACKWARD: _attention_backward,
    },
    on_fallback=fallback.tell,
)
