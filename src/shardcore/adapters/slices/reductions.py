"""Operators along some dims: sums, which may stay pending, and what needs the dims whole."""

from collections.abc import Sequence
from math import prod
from typing import Any

import torch

from shardcore.adapters import torch_compat
from shardcore.adapters.slices.split import run_linear, run_split
from shardcore.adapters.slices.tensor import Slice, settled
from shardcore.adapters.slices.whole import run_whole
from shardcore.adapters.split_operators import Parts
from shardcore.domain import operator_rules_basic as basic
from shardcore.domain import operator_rules_table as table

aten = torch.ops.aten


def _sum(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """`sum(tensor, dims, keepdim)`: what a rank sums is pending."""
    tensor, dims, keep = _dims_of(*args)
    rule = basic.reduced(tensor.ndim, dims, keep, summed=True)

    def call(part: torch.Tensor) -> Sequence[torch.Tensor]:
        return (part.sum(sorted(dims), keep, **kwargs),)

    (result,) = run_linear(operator, rule, tensor, call)
    return result


def _norm(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """`linalg_vector_norm(tensor, ord, dims, keepdim)`: the usual one by a sum of squares."""
    tensor, *rest = args
    order = rest.pop(0) if rest else 2
    if order != 2 or not tensor.is_floating_point():
        return _reduced(operator, (tensor, *rest), kwargs, before=(order,))
    dtype = kwargs.get("dtype") or tensor.dtype
    return settled(squares(tensor, dtype, *rest)).sqrt().to(dtype)


def squares(tensor: Slice, dtype: torch.dtype, *dims: Any) -> Slice:
    """The sum of the squares of `tensor`, of floats that are to become `dtype`."""
    precise = tensor.to(torch.promote_types(dtype, torch.float32))
    total: Slice = _sum(aten.sum.dim_IntList, (precise * precise, *dims), {})
    return total


def _mean(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """`mean(tensor, dims, keepdim)`: the sum, divided by the number of elements of the whole.

    A normalization reads it several times: but for a number it is done at once.
    """
    tensor, dims, _ = _dims_of(*args)
    total = _sum(operator, args, kwargs)
    mean = aten.div.Scalar(total, prod(tensor.shape[dim] for dim in dims))
    return settled(mean) if mean.ndim else mean


def _dims_of(
    tensor: Slice, dims: Any = None, keep: bool = False
) -> tuple[Slice, frozenset[int], bool]:
    """The tensor, the dims that are reduced, none for all of them, and whether they stay."""
    given = [dims] if isinstance(dims, int) else dims or range(tensor.ndim)
    return tensor, frozenset(dim % tensor.ndim for dim in given if tensor.ndim), keep


def _reduced(
    operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any], before: tuple[Any, ...] = ()
) -> Any:
    """`amax(tensor, dims, keepdim)` and its kind: where the dims are whole."""
    tensor, dims, keep = _dims_of(*args, **_keep(kwargs))
    returns = torch_compat.number_of_results(operator)
    rule = basic.reduced(tensor.ndim, dims, keep, summed=False, results=returns)
    rest = (*before, *args[1:])

    def call(parts: Parts) -> Sequence[torch.Tensor]:
        return torch_compat.as_tuple(operator(*parts, *rest, **kwargs))

    return torch_compat.as_returned(operator, run_split(operator, rule, args[:1], call))


def _some(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """`any(tensor, dims, keepdim)`: an empty list is no dims, and not all of them."""
    no_dims = len(args) > 1 and args[1] in ([], ())
    return (run_whole if no_dims else _reduced)(operator, args, kwargs)


def _keep(kwargs: dict[str, Any]) -> dict[str, Any]:
    return {"keep": kwargs["keepdim"]} if "keepdim" in kwargs else {}


def _along_one(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """`operator(tensor, dim, ...)` that keeps the shape and looks along `dim` only."""
    return _along(operator, args, kwargs, args[1] if len(args) > 1 else kwargs.get("dim", -1))


def _along_third(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """`operator(gradient, output, dim, ...)`."""
    return _along(operator, args, kwargs, args[2])


def _along(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any], dim: int) -> Any:
    places = [at for at, each in enumerate(args) if isinstance(each, torch.Tensor)]
    ndim = args[places[0]].ndim

    def call(parts: Parts) -> Sequence[torch.Tensor]:
        local = list(args)
        for at, part in zip(places, parts, strict=True):
            local[at] = part
        return torch_compat.as_tuple(operator(*local, **kwargs))

    whole = frozenset({dim % ndim} if ndim else ())
    rule = table.along(ndim, whole, len(places), torch_compat.number_of_results(operator))
    return torch_compat.as_returned(
        operator, run_split(operator, rule, [args[at] for at in places], call)
    )


HANDLERS: dict[Any, torch_compat.Handler] = {
    aten.sum.dim_IntList: _sum,
    aten.sum.default: _sum,
    aten.mean.dim: _mean,
    aten.linalg_vector_norm.default: _norm,
    aten.mean.default: _mean,
    aten.any.dims: _some,
    aten.all.dims: _some,
    **dict.fromkeys(
        (
            aten.amax.default,
            aten.amin.default,
            aten.any.dim,
            aten.all.dim,
            aten.argmax.default,
            aten.argmin.default,
            aten.logsumexp.default,
            aten.max.dim,
            aten.min.dim,
            aten.prod.dim_int,
            aten.median.dim,
        ),
        _reduced,
    ),
    **dict.fromkeys(
        (*torch_compat.SOFTMAX, aten.cumsum.default, aten.cumprod.default, aten.sort.default),
        _along_one,
    ),
    **dict.fromkeys(torch_compat.SOFTMAX_BACKWARD, _along_third),
}
