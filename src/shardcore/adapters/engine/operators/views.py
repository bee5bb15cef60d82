"""Operators that move elements: views, slices, concatenation, splitting."""

from collections.abc import Callable, Sequence
from math import gcd, prod
from typing import Any

import torch

from shardcore.adapters import torch_compat
from shardcore.adapters.engine.operators.reductions import is_split
from shardcore.adapters.engine.planned import Operand, Task
from shardcore.adapters.engine.registry import Handler, Planner
from shardcore.adapters.engine.view_copies import note_view
from shardcore.domain import operator_rules_basic as basic
from shardcore.domain.layout import Layout, PartialAxes
from shardcore.domain.operator_rules import OperatorRule, letters
from shardcore.domain.placements import stretches_of
from shardcore.domain.planner import Split

aten = torch.ops.aten


def _one(rule: OperatorRule, tensor: Operand, call: Callable[[torch.Tensor], torch.Tensor]) -> Task:
    """One operand, one result."""
    return _several(rule, tensor, lambda part: (call(part),))


def _several(
    rule: OperatorRule, tensor: Operand, call: Callable[[torch.Tensor], Sequence[torch.Tensor]]
) -> Task:
    """One operand, several results."""
    return Task(rule, [tensor], lambda parts: call(parts[0]), linear_in=(0,), of_weights=True)


def _dims_moved(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Task:
    """`permute`, `transpose`, `unsqueeze`: where dims go is seen by sizes that all differ."""
    tensor, *rest = args
    view = operator(torch.empty([*range(2, tensor.ndim + 2)], device="meta"), *rest, **kwargs)
    rule = basic.dims_moved(tensor.ndim, [size - 2 if size > 1 else None for size in view.shape])
    return _one(rule, tensor, lambda part: operator(part, *rest, **kwargs))


def _squeezed(tensor: Operand, dims: Any = None) -> list[int]:
    given = (
        range(tensor.ndim) if dims is None else dims if isinstance(dims, list | tuple) else [dims]
    )
    gone = {dim % max(tensor.ndim, 1) for dim in given}
    return [dim for dim in range(tensor.ndim) if dim not in gone or tensor.shape[dim] != 1]


def _squeeze(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Task:
    """By the dims that have size 1 in the whole, which a part may have by chance."""
    tensor, *rest = args
    left = _squeezed(tensor, *rest, **kwargs)
    gone = [dim for dim in range(tensor.ndim) if dim not in left]
    rule = basic.dims_moved(tensor.ndim, left)
    return _one(rule, tensor, lambda part: part.squeeze(gone) if gone else part.view(part.shape))


def _slice(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Task:
    """`slice(tensor, dim, start, end, step)`."""
    tensor, *rest = args
    dim = (rest[0] if rest else 0) % tensor.ndim
    if not range(tensor.shape[dim])[slice(*rest[1:])]:
        return _empty(tensor, dim)
    found = _stretches(tensor.shape[dim], *rest[1:])
    if found is None:
        rule = basic.along(tensor.ndim, frozenset({dim}))
        return _one(rule, tensor, lambda part: operator(part, *rest, **kwargs))
    count, first, last = found

    def call(part: torch.Tensor) -> Any:
        size = part.shape[dim] // count
        return operator(part, dim, first * size, last * size)

    return _one(basic.pieces(tensor.ndim, dim, count, (last - first,)), tensor, call)


def _empty(tensor: Operand, dim: int) -> Task:
    """A slice without elements along `dim`, for which nothing is gathered."""
    layout = tensor.form.layout
    found = layout.without(*layout.dim_axes(dim)).reduced
    extents = dict(zip(letters(tensor.ndim), tensor.shape, strict=True))
    return Task(
        basic.along(tensor.ndim, frozenset({dim})),
        [tensor],
        lambda parts: (parts[0].narrow(dim, 0, 0),),
        layouts=Split((layout,), (found,), extents, gathers=False),
    )


def _stretches(
    size: int, start: int | None = None, end: int | None = None, step: int = 1
) -> tuple[int, int, int] | None:
    """How many stretches of one size a dim has of which a slice is some, and from which to which.

    None if the slice has a step, or no elements.
    """
    first, last, _ = slice(start, end).indices(size)
    if step != 1 or last <= first:
        return None
    each = gcd(first, last, size)
    return size // each, first // each, last // each


def _slice_backward(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Task:
    """`slice_backward(gradient, sizes, dim, start, end, step)`."""
    gradient, sizes, dim, *rest = args
    dim %= len(sizes)
    found = _stretches(sizes[dim], *rest)
    if found is None:
        rule, of_all = basic.along(gradient.ndim, frozenset({dim})), rest
    else:
        count, first, last = found
        rule = basic.of_pieces(gradient.ndim, dim, count, (last - first,))

    def call(part: torch.Tensor) -> Any:
        local = list(part.shape)
        if found is None:
            local[dim] = sizes[dim]
            return operator(part, local, dim, *of_all, **kwargs)
        size = part.shape[dim] // (last - first)
        local[dim] = count * size
        return operator(part, local, dim, first * size, last * size, 1)

    return _one(rule, gradient, call)


def _select(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Task | Handler:
    """`select(tensor, dim, index)`."""
    tensor, dim, index = args
    layout, dim = tensor.form.layout, dim % tensor.ndim
    in_one_piece = layout.stretches[dim] == 1 and tensor.dtype is not torch.bool
    if is_split(tensor, dim) and in_one_piece:
        return _of_its_rank
    return _one(_less(tensor, dim), tensor, lambda part: operator(part, dim, index))


def _less(tensor: Operand, dim: int, results: int = 1) -> OperatorRule:
    """The rule of slices, which have the dims of `tensor` but for `dim`."""
    dims = [each for each in range(tensor.ndim) if each != dim]
    return basic.dims_moved(tensor.ndim, dims, results)


def _of_its_rank(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The rank that has the slice gives it, the others zeros: a pending sum, not yet sent."""
    tensor, dim, index = args
    engine, layout, shape = tensor.engine, tensor.form.layout, list(tensor.shape)
    dim %= tensor.ndim
    of_dim = Layout(layout.mesh, (layout.spec[dim],), (), (layout.blocks[dim],))
    own = range(shape[dim])[of_dim.slices((shape[dim],), engine.world.position)[0]]
    place = range(shape.pop(dim))[index]
    local = [*tensor.part.shape[:dim], *tensor.part.shape[dim + 1 :]]
    part = (
        tensor.part.select(dim, own.index(place)).clone(memory_format=torch.contiguous_format)
        if place in own
        else tensor.part.new_zeros(local)
    )
    pending: PartialAxes = tuple(
        (axis, "sum") for axis in layout.dim_axes(dim) if layout.mesh.axis_size(axis) > 1
    )
    spec, blocks = list(layout.spec), list(layout.blocks)
    del spec[dim], blocks[dim]
    found = Layout(layout.mesh, spec, (*layout.partial, *pending), blocks)
    result = engine.sharded(part, found, tuple(shape))
    result.memory = tensor.memory
    note_view(result, tensor, lambda full: operator(full, dim, index), is_copy=True)
    return result


def _select_backward(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Task:
    """`select_backward(gradient, sizes, dim, index)`."""
    gradient, sizes, dim, index = args
    dim %= len(sizes)
    dims = range(gradient.ndim)
    rule = basic.dims_moved(gradient.ndim, [*dims[:dim], None, *dims[dim:]])

    def call(part: torch.Tensor) -> Any:
        local = list(part.shape)
        local.insert(dim, sizes[dim])
        return operator(part, local, dim, index, **kwargs)

    return _one(rule, gradient, call)


def _expanded(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Task:
    """`expand(tensor, sizes)`: what is pending is reduced before it is larger."""
    tensor, sizes = args
    new = len(sizes) - tensor.ndim
    dims = [
        dim - new if dim >= new and size in (-1, tensor.shape[dim - new]) else None
        for dim, size in enumerate(sizes)
    ]
    local = [-1 if dim is not None else size for dim, size in zip(dims, sizes, strict=True)]
    grows = any(dim is None and size != 1 for dim, size in zip(dims, sizes, strict=True))
    return Task(
        basic.dims_moved(tensor.ndim, dims),
        [tensor],
        lambda parts: (operator(parts[0], local, **kwargs),),
        linear_in=() if grows else (0,),
        of_weights=True,
    )


def _reshaped(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Task:
    """A view of a part may be impossible where one of the whole is not: it copies there."""
    tensor, sizes = args
    target = _sizes(tensor, sizes)
    found = basic.reshape(tensor.shape, target, _split_dims(tensor))
    return _one(
        found.rule,
        tensor,
        lambda part: part.reshape(found.local_shape(target, tuple(part.shape))),
    )


def _split_dims(tensor: Operand) -> tuple[tuple[int, int], ...]:
    """The dims that several ranks split, each with the number of its stretches."""
    layout = tensor.form.layout
    return tuple(
        (dim, stretches_of(layout.blocks[dim])[0])
        for dim in range(tensor.ndim)
        if any(layout.mesh.axis_size(axis) > 1 for axis in layout.dim_axes(dim))
    )


def _sizes(tensor: Operand, sizes: Sequence[int]) -> tuple[int, ...]:
    """`sizes` with the one that is to be found."""
    if -1 not in sizes:
        return tuple(sizes)
    rest = prod(size for size in sizes if size != -1)
    return tuple(tensor.numel() // max(rest, 1) if size == -1 else size for size in sizes)


def _flipped(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Task:
    tensor, dims = args
    rule = basic.along(tensor.ndim, frozenset(dim % tensor.ndim for dim in dims))
    return Task(rule, [tensor], linear_in=(0,), of_weights=True)


def _concatenated(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Task:
    """`cat(tensors, dim)` and `stack(tensors, dim)`: of sums that are all pending, one is."""
    tensors, *rest = args
    new = operator is aten.stack.default
    dim = rest[0] if rest else kwargs.get("dim", 0)
    if not new:  # empty tensors of one dim join anything
        tensors = [each for each in tensors if each.shape != (0,)] or list(tensors)
    ndim = tensors[0].ndim
    dim %= ndim + new
    sizes = [] if new else [each.shape[dim] for each in tensors]
    if new:
        rule = basic.stacked(ndim, dim, len(tensors))
    elif 0 in sizes:
        rule = basic.along(ndim, frozenset({dim}), len(tensors))
    else:
        size = gcd(*sizes)
        counts = tuple(each // size for each in sizes)
        rule = basic.of_pieces(ndim, dim, sum(counts), counts)
    are_pending = all(each.form.layout.partial for each in tensors)
    adds = range(len(tensors)) if are_pending else ()
    return Task(rule, tensors, lambda parts: (operator(list(parts), dim),), adds=adds)


def _pieces(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Task:
    """`split(tensor, sizes, dim)`."""
    tensor, sizes, *rest = args
    dim = (rest[0] if rest else kwargs.get("dim", 0)) % tensor.ndim
    whole = tensor.shape[dim]
    if not isinstance(sizes, list | tuple):
        sizes = [min(sizes, whole - at) for at in range(0, whole, sizes)] if whole else [0]
    if 0 in sizes:
        rule = basic.along(tensor.ndim, frozenset({dim}), results=len(sizes))
        return _several(rule, tensor, lambda part: torch.split(part, sizes, dim))
    size = gcd(*sizes)
    counts = tuple(each // size for each in sizes)

    def call(part: torch.Tensor) -> Sequence[torch.Tensor]:
        local = part.shape[dim] // sum(counts)
        return torch.split(part, [local * each for each in counts], dim)

    return _several(basic.pieces(tensor.ndim, dim, sum(counts), counts), tensor, call)


def _repeat(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Task | None:
    """`repeat(tensor, repeats)`."""
    tensor, repeats = args
    if 0 in repeats:
        return None
    return Task(basic.repeated(tensor.ndim, repeats), [tensor])


def _unbind(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Task:
    """`unbind(tensor, dim)`."""
    tensor, *rest = args
    dim = (rest[0] if rest else kwargs.get("dim", 0)) % tensor.ndim
    rule = _less(tensor, dim, tensor.shape[dim])
    return _several(rule, tensor, lambda part: operator(part, dim))


PLANNERS: dict[Any, Planner] = {
    **dict.fromkeys((aten.view.default, torch_compat.UNSAFE_VIEW, aten.reshape.default), _reshaped),
    aten.permute.default: _dims_moved,
    aten.transpose.int: _dims_moved,
    aten.t.default: _dims_moved,
    aten.unsqueeze.default: _dims_moved,
    **dict.fromkeys((aten.squeeze.default, aten.squeeze.dim, aten.squeeze.dims), _squeeze),
    aten.expand.default: _expanded,
    aten.slice.Tensor: _slice,
    aten.slice_backward.default: _slice_backward,
    aten.select.int: _select,
    aten.select_backward.default: _select_backward,
    aten.flip.default: _flipped,
    aten.split.Tensor: _pieces,
    aten.split_with_sizes.default: _pieces,
    aten.unbind.int: _unbind,
    aten.repeat.default: _repeat,
    aten.cat.default: _concatenated,
    aten.stack.default: _concatenated,
}
