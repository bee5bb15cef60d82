"""Operators on lists of tensors, such as the update of an optimizer: each tensor for itself."""

from typing import Any

import torch

from shardcore.adapters.slices.tensor import Slice, whole
from shardcore.adapters.slices.writes import brought, settle
from shardcore.adapters.torch_compat import LIST_NORM, writes_list
from shardcore.domain.errors import StrategyError


def on_list(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """`_foreach_add(tensors, ...)` and its kind: each tensor, and what it meets in other lists."""
    if operator == LIST_NORM:
        return [torch.linalg.vector_norm(each, *args[1:], **kwargs) for each in args[0]]
    targets = [_reference(items) for items in _columns(args)]
    writes = writes_list(operator)
    if writes:
        targets = list(args[0])
    for target in targets:
        if isinstance(target, Slice):
            _check(operator, target, writes)
            settle(target)
    local = tuple(_local_operand(each, targets) for each in args)
    found = operator(*local, **kwargs)
    if writes:
        for target in targets:
            if isinstance(target, Slice):
                target.memory.written()
        return None
    if any(part.shape != _part(each).shape for part, each in zip(found, targets, strict=True)):
        raise StrategyError(
            f'{operator} does not keep the shapes of its tensors: strategy "manual" cannot run it '
            "on a list. Call the operator on each tensor."
        )
    return [
        Slice(part, target.mesh_layout, tuple(target.shape), target.world, target.kept)
        if isinstance(target, Slice)
        else part
        for part, target in zip(found, targets, strict=True)
    ]


def _check(operator: Any, target: Slice, writes: bool) -> None:
    if writes and target.copied is not None:
        raise StrategyError(
            f"{operator} writes into a list of tensors, of which one is a view of a split dim. "
            'Strategy "manual" cannot do that: write into each tensor by itself.'
        )


def _part(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.part if isinstance(tensor, Slice) else tensor


def _columns(args: tuple[Any, ...]) -> list[list[Any]]:
    """For each place in the lists, the tensors that meet there."""
    lists = [each for each in args if isinstance(each, list | tuple) and each]
    tensors = [each for each in lists if isinstance(each[0], torch.Tensor)]
    return [list(column) for column in zip(*tensors, strict=True)]


def _reference(tensors: list[Any]) -> Any:
    """The tensor whose layout the result gets: the largest slice, else the first."""
    return max(tensors, key=lambda each: (isinstance(each, Slice), each.ndim))


def _local_operand(operand: Any, targets: list[Any]) -> Any:
    if isinstance(operand, torch.Tensor):
        return whole(operand) if isinstance(operand, Slice) else operand
    if not isinstance(operand, list | tuple) or not operand:
        return operand
    if not isinstance(operand[0], torch.Tensor):
        return operand
    return [_met(each, target) for each, target in zip(operand, targets, strict=True)]


def _met(value: torch.Tensor, target: Any) -> torch.Tensor:
    if isinstance(target, Slice):
        return target.part if value is target else brought(value, target)
    return whole(value) if isinstance(value, Slice) else value
