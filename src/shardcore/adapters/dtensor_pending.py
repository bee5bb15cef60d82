"""Reductions that are not left pending as DTensor leaves them, and tensors made like pending ones.

Known for torch 2.13. A pending reduction is taken for a sum, or for a number of each rank's own, by
what reads it next; or it would be reduced again and again, or when it is larger. These are reduced
at once.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from shardcore.adapters import dtensor_views, torch_compat
from shardcore.adapters.dtensor_placements import is_pending, settled, settled_placements
from shardcore.adapters.dtensor_trust import (
    DISTRUSTED,
    any_split,
    replicated,
    run_whole,
    store,
    whole,
)
from shardcore.adapters.torch_compat import dtensor as dtensor_compat

aten = torch.ops.aten


def _any(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """`any`: DTensor adds up how many ranks found one, and the next operator reads the number."""
    if not any_split(args):
        return dtensor_compat.as_torch_does(operator, args, kwargs)
    x, dim, keepdim = _named(args, kwargs, dim=None, keepdim=False)
    if dim in ([], ()):
        return run_whole(operator, args, kwargs)
    dims = range(x.ndim) if dim is None else [dim] if isinstance(dim, int) else dim
    with torch.no_grad():
        found = settled(x).ne(0).to(torch.uint8).amax(list(dims), keepdim)
        return settled(found).to(torch.uint8 if x.dtype is torch.uint8 else torch.bool)


def _norm(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """`linalg_vector_norm`: what is pending is no sum. DTensor takes no dims as none."""
    _, order, dim = _named(args, kwargs, ord=2, dim=None)
    if any_split(args) and (order == 0 or dim in ([], ())):
        return run_whole(operator, args, kwargs)
    with torch.no_grad():
        return settled(dtensor_compat.as_torch_does(operator, args, kwargs))


def _norms(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """`_foreach_norm`, as the clipping of gradients takes it: norms that lie alike in one move."""
    found = dtensor_compat.as_torch_does(operator, args, kwargs)
    alike: dict[Any, list[int]] = {}
    for at, norm in enumerate(found):
        if is_pending(norm):
            key = norm.device_mesh, tuple(norm.placements), norm.dtype
            alike.setdefault(key, []).append(at)
    settled_norms = list(found)
    with torch.no_grad():
        for places in alike.values():
            reduced = _settled_scalars([found[at] for at in places])
            for at, norm in zip(places, reduced, strict=True):
                settled_norms[at] = norm
    return settled_norms


def _settled_scalars(tensors: Sequence[DTensor]) -> list[DTensor]:
    """Tensors without dims, all in the same placements, reduced together."""
    mesh = tensors[0].device_mesh
    parts = torch.stack([dtensor_compat.local_tensor(each) for each in tensors])
    joined = DTensor.from_local(parts, mesh, tensors[0].placements, run_check=False)
    return [replicated(each, mesh) for each in settled(joined).to_local().unbind()]


def _divide(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """`x / 0` of a pending sum: parts of both signs would add up to nan, where it is infinite."""
    x, divisor = args
    if not isinstance(divisor, torch.Tensor) and divisor == 0 and is_pending(x):
        with torch.no_grad():
            x = settled(x)
    return dtensor_compat.as_torch_does(operator, (x, divisor), kwargs)


def _mean(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """`mean` over some dims: a normalization reads it several times, and each would reduce it."""
    run = run_whole if DISTRUSTED[operator]((args, kwargs)) else dtensor_compat.as_torch_does
    found = run(operator, args, kwargs)
    with torch.no_grad():
        return settled(found) if found.ndim else found


def _expand(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """`expand`, as in the gradient of a sum: what is pending is reduced before it is larger."""
    tensor, *rest = args
    expanded = dtensor_compat.as_torch_does(operator, args, kwargs)
    if not is_pending(tensor) or expanded.numel() <= tensor.numel():
        return expanded
    with torch.no_grad():
        moved = settled(tensor)
        if dtensor_compat.moves(tensor, moved.placements):
            dtensor_views.taken(tensor, moved.placements, dtensor_compat.local_tensor(moved))
        return dtensor_compat.as_torch_does(operator, (moved, *rest), kwargs)


def _where(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """`where(condition, x, y)` of numbers, as a loss has it: a pending number stays pending."""
    condition, *numbers = args
    pending = [each for each in numbers if is_pending(each)]
    if not pending or is_pending(condition) or any(each.ndim for each in args):
        return dtensor_compat.as_torch_does(operator, args, kwargs)
    like = pending[0]
    if not all(_adds_up_as(like, each) for each in pending):
        return dtensor_compat.as_torch_does(operator, args, kwargs)
    with torch.no_grad():
        chosen = condition.to_local() if isinstance(condition, DTensor) else condition
        part = operator(chosen, *[_part_of_sum(each, like) for each in numbers], **kwargs)
    return DTensor.from_local(part, like.device_mesh, like.placements, run_check=False)


def _adds_up_as(like: DTensor, number: DTensor) -> bool:
    sums = (p.is_replicate() or p.is_partial("sum") for p in number.placements)
    return number.placements == like.placements and all(sums)


def _part_of_sum(number: torch.Tensor, like: DTensor) -> torch.Tensor:
    """This rank's part of `number` as a sum over the axes of `like`: the first rank has all."""
    part = dtensor_compat.local_tensor(number) if isinstance(number, DTensor) else number
    mesh = like.device_mesh
    axes = [axis for axis, placement in enumerate(like.placements) if placement.is_partial()]
    first = all(mesh.get_local_rank(axis) == 0 for axis in axes)
    return part if first or is_pending(number) else torch.zeros_like(part)


def _like(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """`empty_like(x)` and its kind of a pending `x`: whole, as its values are no part of a sum."""
    x, *rest = args
    if is_pending(x):
        part = dtensor_compat.local_tensor(x)
        x = DTensor.from_local(  # only its shape is read
            part,
            x.device_mesh,
            settled_placements(x),
            run_check=False,
            shape=x.shape,
            stride=x.stride(),
        )
    return dtensor_compat.as_torch_does(operator, (x, *rest), kwargs)


def _fill(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """`x.fill_(value)` of a pending `x`: the parts add up to the value."""
    target, *rest = args
    rest, kwargs = torch_compat.tree_map_only(DTensor, whole, (rest, kwargs))
    value = torch.empty(target.shape, dtype=target.dtype, device=target.device)
    store(target, operator(value, *rest, **kwargs))
    return target


def _named(args: tuple[Any, ...], kwargs: dict[str, Any], **defaults: Any) -> list[Any]:
    """The first operand, and the numbers after it in the order of `defaults`."""
    given = dict(zip(defaults, args[1:], strict=False))
    found = defaults | given | kwargs
    return [args[0], *(found[name] for name in defaults)]


# Writes into a pending tensor, which `dtensor_writes` runs.
WRITES: dict[Any, torch_compat.Handler] = {
    aten.fill_.Scalar: _fill,
    aten.fill_.Tensor: _fill,
}
HANDLERS: dict[Any, torch_compat.Handler] = {
    aten.mean.dim: _mean,
    aten.expand.default: _expand,
    aten.where.self: _where,
    aten.any.default: _any,
    aten.any.dim: _any,
    aten.any.dims: _any,
    aten.linalg_vector_norm.default: _norm,
    torch_compat.LIST_NORM: _norms,
    aten.div.Scalar: _divide,
    aten.div.Tensor: _divide,
    aten.empty_like.default: _like,
    aten.full_like.default: _like,
    aten.new_empty.default: _like,
    aten.new_empty_strided.default: _like,
    aten.new_full.default: _like,
    aten.new_ones.default: _like,
    aten.new_zeros.default: _like,
    aten.ones_like.default: _like,
    aten.zeros_like.default: _like,
}
