"""Operators along some dims: sums, which may stay pending, and others, which need full dims."""

from math import prod
from typing import Any

import torch

from shardcore.adapters import torch_compat
from shardcore.adapters.engine.moves.redistribution import in_layout, reduced
from shardcore.adapters.engine.operators.reduce import packed_argmax
from shardcore.adapters.engine.operators.reduce.composed import run_softmax
from shardcore.adapters.engine.plans.task import Handler, Operand, Planner, Task
from shardcore.domain.layout import Layout
from shardcore.domain.placements import ReduceOp
from shardcore.domain.rules import everyday

aten = torch.ops.aten


def _sum(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Task | Handler:
    """`sum(tensor, dims, keepdim)`: the sum of each rank is pending."""
    tensor, dims, keep = _dims_of(*args)
    if _is_count(tensor, dims, keep) and not kwargs:
        return _count
    return Task(everyday.reduced(tensor.ndim, dims, keep, "sum"), [tensor], linear_in=(0,))


def _is_count(tensor: Operand, dims: frozenset[int], keep: bool) -> bool:
    """Whether several ranks count what is true, and not for one number alone."""
    is_number = len(dims) == tensor.ndim and not keep
    fits = prod(tensor.shape[dim] for dim in dims) <= torch.iinfo(torch.int32).max
    splits = any(tensor.is_split(dim) for dim in dims)
    return tensor.dtype is torch.bool and fits and splits and not is_number


def _count(_operator: Any, args: tuple[Any, ...], _kwargs: dict[str, Any]) -> Any:
    """How many are true. That takes 64 bits on one device, and half of them to be sent."""
    tensor, dims, keep = _dims_of(*args)
    return reduced(tensor.sum(sorted(dims), keep, dtype=torch.int32)).to(torch.int64)


def _norm(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Task | Handler:
    """`linalg_vector_norm(tensor, ord, dims, keepdim)`: the usual one by a sum of squares."""
    tensor, *rest = args
    order = rest.pop(0) if rest else 2
    if order == 2 and tensor.dtype.is_floating_point:
        return _root_of_squares
    return _reduced(operator, (tensor, *rest), kwargs)


def _root_of_squares(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    tensor, _, *dims = (*args, 2) if len(args) == 1 else args
    dtype = kwargs.get("dtype") or tensor.dtype
    return reduced(squares(tensor, dtype, *dims)).sqrt().to(dtype)


def squares(tensor: Any, dtype: torch.dtype, dims: Any = None, keep: bool = False) -> Any:
    """The sum of the squares of `tensor`, of floats that are to become `dtype`."""
    precise = tensor.to(torch.promote_types(dtype, torch.float32))
    return (precise * precise).sum(dims or list(range(tensor.ndim)), keep)


def _mean(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """`mean(tensor, dims, keepdim)`: the sum, divided by the number of elements.

    A normalization reads it several times: but for a number it is reduced at once.
    """
    tensor, dims, keep = _dims_of(*args)
    total = tensor.sum(sorted(dims), keep, **kwargs)
    mean = total / prod(tensor.shape[dim] for dim in dims)
    return reduced(mean) if mean.ndim else mean


def _dims_of(
    tensor: Any, dims: Any = None, keepdim: bool = False, **_: Any
) -> tuple[Any, frozenset[int], bool]:
    """The tensor, the dims that are reduced, none for all of them, and whether they stay."""
    given = [dims] if isinstance(dims, int) else dims or range(tensor.ndim)
    return tensor, frozenset(dim % tensor.ndim for dim in given if tensor.ndim), keepdim


def _reduced(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Task:
    """`argmax(tensor, dims, keepdim)` and similar; of some, each rank reduces its own elements."""
    tensor, dims, keep = _dims_of(*args, **kwargs)
    results = torch_compat.number_of_results(operator)
    rule = everyday.reduced(tensor.ndim, dims, keep, _EXTREMES.get(operator), results)
    return Task(rule, [tensor])


def _any(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Task | Handler | None:
    """`any(tensor, dims, keepdim)` and `all`: an empty list is no dims, and not all of them."""
    tensor, dims, _ = _dims_of(*args, **kwargs)
    if len(args) > 1 and args[1] in ([], ()):
        return None
    if any(tensor.is_split(dim) for dim in dims):
        return _any_of_split
    return _reduced(operator, args, kwargs)


def _any_of_split(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    tensor, dims, keep = _dims_of(*args, **kwargs)
    found = reduced(tensor).ne(0).to(torch.uint8)
    of_ranks = found.amin if torch_compat.aten_name(operator) == "all" else found.amax
    dtype = torch.uint8 if tensor.dtype is torch.uint8 else torch.bool
    return reduced(of_ranks(sorted(dims), keep)).to(dtype)


def _argmax(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Task | Handler:
    """`argmax(tensor, dim, keepdim)`: along a split dim each rank sends one number a row."""
    tensor, dim = args[0], args[1] if len(args) > 1 else None
    if kwargs or dim is None or not tensor.is_split(dim):
        return _reduced(operator, args, kwargs)
    served = tensor.dtype in packed_argmax.SERVED
    return packed_argmax.argmax if served else _reduced(operator, args, kwargs)


def _along_one(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Task:
    """`operator(tensor, dim, ...)` that keeps the shape and looks along `dim` only."""
    return _along(operator, args, args[1] if len(args) > 1 else kwargs.get("dim", -1))


def _along(operator: Any, args: tuple[Any, ...], dim: int) -> Task:
    operands = [each for each in args if isinstance(each, Operand)]
    ndim = operands[0].ndim
    full = frozenset({dim % ndim} if ndim else ())
    returns = torch_compat.number_of_results(operator)
    return Task(everyday.along(ndim, full, len(operands), returns), operands)


def _logsumexp(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Task | Handler:
    """`logsumexp(tensor, dims, keepdim)`."""
    tensor, dims, _ = _dims_of(*args, **kwargs)
    if tensor.dtype.is_floating_point and any(tensor.is_split(dim) for dim in dims):
        return run_softmax
    return _reduced(operator, args, kwargs)


def _softmax(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Task | Handler:
    """`_softmax(tensor, dim, in_float)`, `_softmax_backward_data(gradient, output, dim, dtype)`."""
    *_, tensor, dim, _ = args
    if not kwargs and tensor.is_split(dim):
        return run_softmax
    return _along(operator, args, dim)


def _bincount(_operator: Any, args: tuple[Any, ...], _kwargs: dict[str, Any]) -> Handler | None:
    """`bincount(numbers, weights, minlength)`; of no numbers torch's result has another dtype."""
    numbers = args[0]
    sizes = numbers.form.layout.chunk_sizes(0, numbers.shape[0])
    return _count_own if numbers.is_split(0) and min(sizes) else None


def _count_own(operator: Any, args: tuple[Any, ...], _kwargs: dict[str, Any]) -> Any:
    """Each rank counts its own numbers: a pending sum, as long as the largest number needs."""
    numbers = reduced(args[0])
    engine, layout = numbers.engine, numbers.form.layout
    weights = args[1] if len(args) > 1 else None
    if weights is not None:
        weights = in_layout(engine.as_sharded(weights), layout).part
    found = operator(numbers.part, weights, *args[2:])

    def of_all(part: torch.Tensor, op: ReduceOp) -> Any:
        pending = Layout(layout.mesh, (None,), dict.fromkeys(layout.dim_axes(0), op))
        return engine.sharded(part, pending, tuple(part.shape))

    length = int(reduced(of_all(found.new_tensor([found.numel()], dtype=torch.int64), "max")).part)
    padded = torch.nn.functional.pad(found, (0, length - found.numel()))
    return of_all(padded, "sum")


# Reductions whose results of the ranks are reduced by the same operation.
_EXTREMES: dict[Any, ReduceOp] = {
    aten.amax.default: "max",
    aten.amin.default: "min",
    aten.max.default: "max",
    aten.min.default: "min",
    aten.prod.default: "product",
    aten.prod.dim_int: "product",
}
PLANNERS: dict[Any, Planner] = {
    aten.sum.dim_IntList: _sum,
    aten.sum.default: _sum,
    aten.linalg_vector_norm.default: _norm,
    **dict.fromkeys(
        (
            aten.any.default,
            aten.any.dim,
            aten.any.dims,
            aten.all.default,
            aten.all.dim,
            aten.all.dims,
        ),
        _any,
    ),
    aten.argmax.default: _argmax,
    aten.bincount.default: _bincount,
    **dict.fromkeys(
        (
            *_EXTREMES,
            aten.argmin.default,
            aten.max.dim,
            aten.min.dim,
            aten.median.dim,
        ),
        _reduced,
    ),
    **dict.fromkeys((aten.cumsum.default, aten.cumprod.default, aten.sort.default), _along_one),
    aten.logsumexp.default: _logsumexp,
    **dict.fromkeys((*torch_compat.SOFTMAX, *torch_compat.SOFTMAX_BACKWARD), _softmax),
}
HANDLERS: dict[Any, Handler] = {aten.mean.dim: _mean, aten.mean.default: _mean}
