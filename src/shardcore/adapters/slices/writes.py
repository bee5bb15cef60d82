"""Operators that write into their first operand, which keeps its layout."""

from typing import Any

import torch

from shardcore.adapters import fallback, torch_compat
from shardcore.adapters.slices.elementwise import ADDING, lies_alike
from shardcore.adapters.slices.tensor import (
    Slice,
    cut,
    in_layout,
    settled,
    whole,
    without_pending,
)
from shardcore.adapters.torch_compat import tree_map_only
from shardcore.domain.errors import StrategyError
from shardcore.domain.layout import Layout

aten = torch.ops.aten


def write(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """An operator that writes into its first operand, which keeps its layout."""
    target, *others = args
    if not isinstance(target, Slice):
        operator(
            target, *tree_map_only(Slice, whole, others), **tree_map_only(Slice, whole, kwargs)
        )
        return target
    if target.copied is not None:
        return _write_through(operator, args, kwargs)
    if not _lies_alike(operator, others, target):
        settle(target)
    if _is_elementwise(operator):
        local = tree_map_only(torch.Tensor, lambda each: brought(each, target), (others, kwargs))
        operator(target.part, *local[0], **local[1])
    elif target.is_whole:
        plain = tree_map_only(Slice, whole, (others, kwargs))
        operator(target.part, *plain[0], **plain[1])
    else:
        _write_whole(operator, args, kwargs)
    target.memory.written()
    return target


def _write_whole(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    target, *others = args
    fallback.tell(operator, [target])
    plain_others, plain_kwargs = tree_map_only(Slice, whole, (others, kwargs))
    value = whole(target).clone()
    operator(value, *plain_others, **plain_kwargs)
    target.part.copy_(cut(value, target.mesh_layout, target.world))


def _write_through(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Write into a view that does not share the memory of its base: both get the values."""
    target, *others = args
    base = torch_compat.base_of(target)
    if not isinstance(base, Slice):
        raise StrategyError(
            f"{operator} writes into a view of shape {tuple(target.shape)} of a split dim, whose "
            'base is not known. Strategy "manual" cannot do that: write into the tensor itself.'
        )
    settle(base)
    target.mesh_layout = without_pending(target.mesh_layout)
    plain_others, plain_kwargs = tree_map_only(Slice, whole, (others, kwargs))
    value = whole(base).clone()
    view = torch_compat.same_view(target, value)
    operator(view, *plain_others, **plain_kwargs)
    base.part.copy_(cut(value, base.mesh_layout, base.world))
    target.part.copy_(cut(view, target.mesh_layout, target.world))
    base.memory.written()
    target.copied = base.memory, base.memory.writes
    return target


def settle(target: Slice) -> None:
    """Do what is pending in `target`, in place."""
    if target.is_pending:
        done = settled(target)
        target.part.copy_(done.part)
        target.memory.written()
        target.mesh_layout = done.mesh_layout


def _lies_alike(operator: Any, others: list[Any], target: Slice) -> bool:
    """Whether pending sums are added that lie alike."""
    return operator in ADDING and all(
        isinstance(each, Slice) and lies_alike(each, target) for each in others
    )


_ELEMENTWISE = {aten.copy_.default, aten.fill_.Scalar, aten.fill_.Tensor, aten.zero_.default}


def _is_elementwise(operator: Any) -> bool:
    return operator in _ELEMENTWISE or torch_compat.is_elementwise(operator)


def reshape(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """`squeeze_` and its kind: the tensor becomes what `squeeze` makes of it."""
    target = args[0]
    changed = torch_compat.out_of_place(operator)(*args, **kwargs)
    target.part, target.mesh_layout = changed.part, changed.mesh_layout
    return torch_compat.reshaped_in_place(operator, args, kwargs, target)


HANDLERS: dict[Any, torch_compat.Handler] = dict.fromkeys(
    torch_compat.reshaping_operators(), reshape
)


def brought(value: torch.Tensor, target: Slice) -> torch.Tensor:
    """This rank's part of `value`, as it meets the part of `target` element by element."""
    missing = target.ndim - value.ndim
    spec = tuple(
        entry if size == target.shape[dim + missing] else None
        for dim, (size, entry) in enumerate(
            zip(value.shape, target.mesh_layout.spec[missing:], strict=True)
        )
    )
    if not isinstance(value, Slice):
        return cut(value, Layout(target.world.mesh, spec), target.world)
    if lies_alike(value, target):
        return value.part
    return in_layout(value, Layout(target.world.mesh, spec)).part
