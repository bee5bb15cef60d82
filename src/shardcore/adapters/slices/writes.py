"""Operators that write into their first operand, which keeps its layout."""

from typing import Any

import torch

from shardcore.adapters import fallback, torch_compat
from shardcore.adapters.slices.copies import settle, write_through
from shardcore.adapters.slices.elementwise import ADDING, lies_alike
from shardcore.adapters.slices.tensor import Slice, cut, in_layout, whole
from shardcore.adapters.torch_compat import tree_map_only
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
        plain, named = tree_map_only(Slice, whole, (others, kwargs))
        write_through(target, lambda view: operator(view, *plain, **named))
        return target
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
    if target.copied is not None:
        target.copied = changed.copied
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
