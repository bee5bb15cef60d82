"""Operators on lists of tensors, such as the update of an optimizer: each tensor for itself."""

from typing import Any

import torch

from shardcore.adapters.slices.copies import settle, write_through
from shardcore.adapters.slices.reductions import squares
from shardcore.adapters.slices.tensor import Slice, replicated, whole
from shardcore.adapters.slices.writes import brought
from shardcore.adapters.torch_compat import LIST_NORM, tree_map_only, writes_list
from shardcore.domain.errors import StrategyError
from shardcore.domain.layout import Layout


def on_list(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """`_foreach_add(tensors, ...)` and its kind: each tensor, and what it meets in other lists."""
    if operator == LIST_NORM:
        return _norms(*args, **kwargs)
    if not writes_list(operator):
        return _made(operator, args, kwargs)
    if any(isinstance(each, Slice) and each.copied is not None for each in args[0]):
        for at in range(len(args[0])):
            _write(operator, tuple(_only(at, each, len(args[0])) for each in args), kwargs)
    else:
        _write(operator, args, kwargs)
    return None


def _norms(tensors: list[Any], order: Any = 2, dtype: Any = None) -> list[Any]:
    """The norm of each, as the clipping of gradients takes it: the usual ones by one reduction."""
    norms: list[Any] = [None] * len(tensors)
    alike: dict[Any, list[int]] = {}
    for at, each in enumerate(tensors):
        if isinstance(each, Slice) and order == 2 and each.is_floating_point():
            norms[at] = squares(each, dtype or each.dtype)
            alike.setdefault((norms[at].mesh_layout, norms[at].dtype), []).append(at)
        else:
            norms[at] = torch.linalg.vector_norm(each, order, dtype=dtype)
    for places in alike.values():
        for at, total in zip(places, _settled([norms[at] for at in places]), strict=True):
            norms[at] = total.sqrt().to(dtype or tensors[at].dtype)
    return norms


def _settled(scalars: list[Slice]) -> list[Slice]:
    """Slices without dims that lie alike, their pending sums done together."""
    first = scalars[0]
    if not first.is_pending:
        return scalars
    layout = Layout(first.world.mesh, (None,), first.mesh_layout.partial)
    parts = torch.stack([each.part for each in scalars])
    joined = whole(Slice(parts, layout, (len(scalars),), first.world))
    return [replicated(each, first.world) for each in joined.unbind()]


def _made(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    """The tensors that `operator` makes, each in the layout of one that it is made of."""
    targets = [_reference(items) for items in _columns(args)]
    for target in targets:
        if isinstance(target, Slice):
            settle(target)
    found = operator(*(_local_operand(each, targets) for each in args), **kwargs)
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


def _write(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Write into each of the first list; into a view that is a copy only if it is alone there."""
    targets, *others = args
    first = targets[0]
    if isinstance(first, Slice) and first.copied is not None:
        plain = tree_map_only(Slice, whole, others)
        write_through(first, lambda view: operator([view], *plain, **kwargs))
        return
    for target in targets:
        if isinstance(target, Slice):
            settle(target)
    operator(*(_local_operand(each, targets) for each in args), **kwargs)
    for target in targets:
        if isinstance(target, Slice):
            target.memory.written()


def _only(at: int, operand: Any, count: int) -> Any:
    """Of a list of `count` the one at `at`, in a list."""
    of_each = isinstance(operand, list | tuple) and len(operand) == count
    return [operand[at]] if of_each else operand


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
