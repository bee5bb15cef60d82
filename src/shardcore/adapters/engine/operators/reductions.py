"""Reductions: sums and others whose result may stay partial, and those that need full dims."""

from collections.abc import Sequence
from math import prod
from typing import Any

import torch

from shardcore.adapters import torch_private
from shardcore.adapters.engine.operators.composed import run_softmax
from shardcore.adapters.engine.operators.views import along_one
from shardcore.adapters.engine.redistribution import in_layout, reduced
from shardcore.adapters.engine.task import Handler, Operand, Planner, Task, by_operator
from shardcore.adapters.engine.tensor import ShardedTensor
from shardcore.adapters.torch_private import Operator
from shardcore.domain.engine.rules import basic
from shardcore.domain.layouts.derived_layouts import reduced_by_ranks, with_dims, without_blocks
from shardcore.domain.layouts.placements import ReduceOp


def _cumsum(operator: Operator, tensor: Operand, dim: int, **_kwargs: object) -> Task | Handler:
    """Plans `cumsum(tensor, dim)`; parts of a dim in segments do not follow one another."""
    if tensor.ndim and tensor.is_sharded(dim) and tensor.form.layout.segments[dim] == 1:
        return _of_sharded
    return along_one(operator, [tensor], tensor.ndim, dim)


def _of_sharded(operator: Operator, x: ShardedTensor, dim: int, **kwargs: object) -> Any:
    """Runs `cumsum` along a sharded dim; the ranks send one total for each of its lines."""
    x, dim = reduced(x), dim % x.ndim
    engine, layout = x.engine, x.form.layout
    axes, shape = layout.dim_axes(dim), tuple(x.shape)
    part = operator(x.part, dim, **kwargs)
    own = x.part.sum(dim, keepdim=True, dtype=part.dtype)
    of_ranks = without_blocks(layout, dim)
    sizes = (*shape[:dim], layout.mesh.size_along(axes), *shape[dim + 1 :])
    totals = in_layout(engine.sharded(own, of_ranks, sizes), of_ranks.without(*axes)).part
    before = of_ranks.slices(sizes, engine.world.position)[dim].start
    return engine.sharded(part + totals.narrow(dim, 0, before).sum(dim, True), layout, shape)


# Floats that float32 represents exactly: an argmax along a sharded dim sends the bits of one.
_EXACT_IN_FLOAT32 = (torch.float32, torch.bfloat16, torch.float16)
_LEAST = torch.iinfo(torch.int64).min
_HALF = 1 << 32
_SIGN = 0x7FFFFFFF


def _sum(_operator: Operator, *args: Any, **kwargs: object) -> Task | Handler:
    """Plans `sum(tensor, dims, keepdim)`: the sum of each rank is partial."""
    tensor, dims, keep = _dims_of(*args)
    if _is_count(tensor, dims, keep) and not kwargs:
        return _count
    return Task(basic.reduction(tensor.ndim, dims, keep, "sum"), [tensor], linear_in=(0,))


def _is_count(tensor: Operand, dims: frozenset[int], keep: bool) -> bool:
    """Tells whether several ranks count true values, for more than one result."""
    is_number = len(dims) == tensor.ndim and not keep
    fits = prod(tensor.shape[dim] for dim in dims) <= torch.iinfo(torch.int32).max
    is_sharded = any(tensor.is_sharded(dim) for dim in dims)
    return tensor.dtype is torch.bool and fits and is_sharded and not is_number


def _count(_operator: Operator, *args: Any) -> Any:
    """Counts true values in 64 bits, as on one device, and sends 32 of them."""
    tensor, dims, keep = _dims_of(*args)
    return reduced(tensor.sum(sorted(dims), keep, dtype=torch.int32)).to(torch.int64)


def _norm(
    operator: Operator, tensor: Operand, order: float = 2, *dims: object, **kwargs: object
) -> Task | Handler:
    """Plans `linalg_vector_norm`: the usual one by a sum of squares."""
    if order == 2 and tensor.dtype.is_floating_point:
        return _root_of_squares
    return _reduce(operator, tensor, *dims, **kwargs)


def _root_of_squares(
    _operator: Operator,
    tensor: torch.Tensor,
    _order: float = 2,
    *dims: Any,
    dtype: torch.dtype | None = None,
) -> Any:
    dtype = dtype or tensor.dtype
    return reduced(squares(tensor, dtype, *dims)).sqrt().to(dtype)


def squares(
    tensor: torch.Tensor, dtype: torch.dtype, dims: list[int] | None = None, keep: bool = False
) -> Any:
    """Sums the squares of the floats in `tensor`, in `dtype` or at least float32."""
    precise = tensor.to(torch.promote_types(dtype, torch.float32))
    return (precise * precise).sum(dims or list(range(tensor.ndim)), keep)


def _mean(_operator: Operator, *args: Any, **kwargs: object) -> Any:
    """Runs `mean(tensor, dims, keepdim)`: the sum, divided by the number of elements.

    A normalization reads it several times, so it is reduced at once, unless it is a number.
    """
    tensor, dims, keep = _dims_of(*args)
    total = tensor.sum(sorted(dims), keep, **kwargs)
    mean = total / prod(tensor.shape[dim] for dim in dims)
    return reduced(mean) if mean.ndim else mean


def _dims_of(
    tensor: Any, dims: int | Sequence[int] | None = None, keepdim: bool = False, **_: object
) -> tuple[Any, frozenset[int], bool]:
    """Parses the tensor, the reduced dims, by default all of them, and whether they stay."""
    given = [dims] if isinstance(dims, int) else dims or range(tensor.ndim)
    return tensor, frozenset(dim % tensor.ndim for dim in given if tensor.ndim), keepdim


def _reduce(operator: Operator, *args: Any, **kwargs: Any) -> Task:
    """Plans `argmax(tensor, dims, keepdim)` and similar; some have partial results."""
    tensor, dims, keep = _dims_of(*args, **kwargs)
    results = torch_private.number_of_results(operator)
    rule = basic.reduction(tensor.ndim, dims, keep, _EXTREMES.get(operator), results)
    return Task(rule, [tensor])


def _any(operator: Operator, *args: Any) -> Task | Handler | None:
    """Plans `any(tensor, dims, keepdim)` and `all`: an empty list means no dims."""
    tensor, dims, _ = _dims_of(*args)
    if len(args) > 1 and args[1] in ([], ()):
        return None
    if any(tensor.is_sharded(dim) for dim in dims):
        return _any_of_sharded
    return _reduce(operator, *args)


def _any_of_sharded(operator: Operator, *args: Any) -> Any:
    """Runs `any`; and `all` as no element that is false.

    By a maximum: on a CPU Inductor computes wrong minimums of `uint8`, in torch 2.13 to 2.15:
    https://github.com/pytorch/pytorch/issues/191499
    """
    tensor, dims, keep = _dims_of(*args)
    is_all = torch_private.aten_name(operator) == "all"
    tensor = reduced(tensor)
    hits = tensor.eq(0) if is_all else tensor.ne(0)
    of_ranks = reduced(hits.to(torch.uint8).amax(sorted(dims), keep))
    dtype = torch.uint8 if tensor.dtype is torch.uint8 else torch.bool
    return (of_ranks.eq(0) if is_all else of_ranks).to(dtype)


def _argmax(
    operator: Operator, tensor: Operand, dim: int | None = None, keep: bool = False
) -> Task | Handler:
    """Plans `argmax`; along a sharded dim each rank sends one number a row."""
    if dim is not None and tensor.is_sharded(dim) and tensor.dtype in _EXACT_IN_FLOAT32:
        return _argmax_of_sharded
    return _reduce(operator, tensor, dim, keep)


def _argmax_of_sharded(_operator: Operator, x: ShardedTensor, dim: int, keep: bool = False) -> Any:
    """Runs `argmax(x, dim, keepdim)` along a sharded dim, in one all-reduce."""
    x, dim = reduced(x), dim % x.ndim
    engine, layout = x.engine, x.form.layout
    numbers = engine.replicated(torch.arange(x.shape[dim], device=x.device))
    own = in_layout(numbers, with_dims(layout, [dim])).part
    pending = reduced_by_ranks(layout, dim, "max")
    shape = (*x.shape[:dim], 1, *x.shape[dim + 1 :])
    largest = reduced(engine.sharded(_pack_value_and_index(x.part, own, dim), pending, shape))
    indices = engine.sharded(_HALF - 1 - (largest.part & (_HALF - 1)), largest.form.layout, shape)
    return indices if keep else indices.squeeze(dim)


def _pack_value_and_index(part: torch.Tensor, numbers: torch.Tensor, dim: int) -> torch.Tensor:
    """Packs the largest value of each row of `part` and its index into one integer.

    `part` has this rank's values, which may be none, `numbers` their indices along the full dim.
    The reduced `dim` keeps one entry. The upper half of a result grows with the value, its lower
    half falls with the index. So the maximum over the ranks belongs to the largest value, and of
    equal values to the first.
    """
    if not part.shape[dim]:
        return torch.full_like(part.sum(dim, keepdim=True), _LEAST, dtype=torch.int64)
    values, indices = part.float().max(dim, keepdim=True)
    return _order_bits(values) * _HALF + (_HALF - 1 - numbers[indices])


def _order_bits(values: torch.Tensor) -> torch.Tensor:
    """Converts floats to integers in the same order; nan is the largest, as in torch."""
    full = values + 0.0  # minus zero is zero
    bits = full.view(torch.int32).to(torch.int64)
    ordered = torch.where(bits < 0, bits ^ _SIGN, bits)
    return ordered.masked_fill(values.isnan(), _SIGN)


def _along_one(
    operator: Operator, tensor: Operand, dim: int = -1, *_: object, **_kwargs: object
) -> Task:
    """Plans `operator(tensor, dim, ...)` that keeps the shape and needs the full `dim` only."""
    return along_one(operator, [tensor], tensor.ndim, dim)


def _norm_of_rows(
    _operator: Operator,
    tensor: torch.Tensor,
    power: float | None,
    dims: list[int],
    keepdim: bool = False,
) -> Any:
    """Runs the norm of `torch.nn.functional.pairwise_distance` as that of vectors."""
    return torch.linalg.vector_norm(tensor, 2 if power is None else power, dims, keepdim)


def _topk(
    operator: Operator, tensor: Operand, _count: int, dim: int = -1, *_: object, **_kwargs: object
) -> Task:
    return _along_one(operator, tensor, dim)


def _logsumexp(operator: Operator, *args: Any) -> Task | Handler:
    tensor, dims, _ = _dims_of(*args)
    if tensor.dtype.is_floating_point and any(tensor.is_sharded(dim) for dim in dims):
        return run_softmax
    return _reduce(operator, *args)


def _softmax(operator: Operator, *args: Any) -> Task | Handler:
    """Plans `softmax(tensor, dim, in_float)`, or its gradient: `(gradient, output, dim, dtype)`."""
    *_, tensor, dim, _ = args
    if tensor.is_sharded(dim):
        return run_softmax
    return along_one(operator, args, tensor.ndim, dim)


def _safe_softmax(operator: Operator, tensor: Operand, dim: int, *_: object) -> Task | Handler:
    """Plans the softmax of an attention by products: `(tensor, dim, dtype)`."""
    return run_softmax if tensor.is_sharded(dim) else _along_one(operator, tensor, dim)


def _bincount(_operator: Operator, numbers: Operand, *_rest: object) -> Handler | None:
    """Plans `bincount`; without numbers torch's result has another dtype."""
    sizes = numbers.form.layout.chunk_sizes(0, numbers.shape[0])
    return _count_own if numbers.is_sharded(0) and min(sizes) else None


def _count_own(
    operator: Operator, numbers: ShardedTensor, weights: torch.Tensor | None = None, *least: int
) -> Any:
    """Counts each rank's numbers: a partial sum, as long as the largest number needs."""
    numbers = reduced(numbers)
    engine, layout = numbers.engine, numbers.form.layout
    if weights is not None:
        weights = in_layout(engine.as_sharded(weights), layout).part
    counts = operator(numbers.part, weights, *least)

    def of_all(part: torch.Tensor, op: ReduceOp) -> Any:
        return engine.sharded(part, reduced_by_ranks(layout, 0, op), tuple(part.shape))

    length = int(
        reduced(of_all(counts.new_tensor([counts.numel()], dtype=torch.int64), "max")).part
    )
    padded = torch.nn.functional.pad(counts, (0, length - counts.numel()))
    return of_all(padded, "sum")


# Reductions whose partial results are reduced by the same operation.
_EXTREMES: dict[Any, ReduceOp] = by_operator(
    {"amax max": "max", "amin min": "min", "prod prod.dim_int": "product"}
)
PLANNERS: dict[Any, Planner] = {
    **by_operator(
        {
            "sum sum.dim_IntList": _sum,
            "linalg_vector_norm": _norm,
            "any any.dim any.dims all all.dim all.dims": _any,
            "argmax": _argmax,
            "bincount": _bincount,
            "argmin max.dim min.dim median.dim": _reduce,
            "cumprod sort": _along_one,
            "cumsum": _cumsum,
            "logsumexp": _logsumexp,
            "topk": _topk,
        }
    ),
    **dict.fromkeys(_EXTREMES, _reduce),
    torch_private.SAFE_SOFTMAX: _safe_softmax,
    **dict.fromkeys((*torch_private.SOFTMAX, *torch_private.SOFTMAX_BACKWARD), _softmax),
}
HANDLERS: dict[Any, Handler] = by_operator(
    {"mean mean.dim": _mean, "norm.ScalarOpt_dim": _norm_of_rows}
)
