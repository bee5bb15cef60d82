"""Views and other operators that move dims: transposes, reshapes, expansions."""

from collections.abc import Callable, Sequence
from functools import cache
from math import prod
from typing import Any

import torch

from shardcore.adapters import torch_private
from shardcore.adapters.engine.engine import Engine
from shardcore.adapters.engine.task import Compute, Operand, Parts, Planner, Task, by_operator
from shardcore.adapters.torch_private import Operator
from shardcore.domain.engine.choice import Sharding
from shardcore.domain.engine.rules import basic, movement
from shardcore.domain.engine.rules.rule import OperatorRule
from shardcore.domain.engine.segments import sharded_dims
from shardcore.domain.errors import LayoutError, ShardedTensorError


def one_result(
    rule: OperatorRule, tensor: Operand, call: Callable[[torch.Tensor], torch.Tensor]
) -> Task:
    """Plans an operator that is linear in its one operand, and has one result."""
    return several_results(rule, tensor, lambda part: (call(part),))


def several_results(
    rule: OperatorRule, tensor: Operand, call: Callable[[torch.Tensor], Sequence[torch.Tensor]]
) -> Task:
    """Plans an operator that is linear in its one operand, and has several results."""
    return Task(rule, [tensor], lambda parts: call(parts[0]), linear_in=(0,), of_weights=True)


def along(operator: Operator, args: Sequence[object], full: frozenset[int]) -> Task:
    """Plans an operator along the dims in `full`; all its tensors have the same dims."""
    operands = [arg for arg in args if isinstance(arg, Operand)]
    results = torch_private.number_of_results(operator)
    return Task(basic.along(operands[0].ndim, full, len(operands), results), operands)


def along_one(operator: Operator, args: Sequence[object], ndim: int, dim: int) -> Task:
    """Plans an operator along `dim`; all its tensors have the same `ndim` dims."""
    return along(operator, args, frozenset({dim % ndim} if ndim else ()))


def _permute(operator: Operator, tensor: Operand, *rest: object) -> Task:
    """Plans `permute`, `transpose`, `unsqueeze`: a probe of distinct sizes has the order."""
    view = operator(torch.empty([*range(2, tensor.ndim + 2)], device="meta"), *rest)
    rule = movement.permute(tensor.ndim, [size - 2 if size > 1 else None for size in view.shape])
    return one_result(rule, tensor, lambda part: operator(part, *rest))


def _squeeze(_operator: Operator, tensor: Operand, *dims: int | list[int]) -> Task:
    """Plans `squeeze` by the global sizes: a local shard may have size 1 in further dims."""
    given = torch_private.as_tuple(dims[0]) if dims else range(tensor.ndim)
    gone = {dim % tensor.ndim for dim in given if tensor.ndim and tensor.shape[dim] == 1}
    rule = movement.permute(tensor.ndim, [dim for dim in range(tensor.ndim) if dim not in gone])

    def call(part: torch.Tensor) -> torch.Tensor:
        return part.squeeze(sorted(gone)) if gone else part.view(part.shape)

    return one_result(rule, tensor, call)


def _expand(operator: Operator, tensor: Operand, sizes: Sequence[int], **kwargs: object) -> Task:
    """Plans `expand`; a partial tensor is reduced first, while it is smaller."""
    dims = movement.source_dims(tensor.shape, sizes)
    local = [-1 if dim is not None else size for dim, size in zip(dims, sizes, strict=True)]
    grows = any(dim is None and size != 1 for dim, size in zip(dims, sizes, strict=True))
    return Task(
        movement.permute(tensor.ndim, dims),
        [tensor],
        lambda parts: (operator(parts[0], local, **kwargs),),
        linear_in=() if grows else (0,),
        of_weights=True,
    )


def _reshape(_operator: Operator, tensor: Operand, sizes: Sequence[int]) -> Task:
    """Plans a reshape; it copies if the local shard allows no view."""
    rest = max(prod(size for size in sizes if size != -1), 1)
    target = tuple(tensor.numel() // rest if size == -1 else size for size in sizes)
    # Some axes may shard the segments of a dim, and others within them (ADR 50).
    sharded = sharded_dims(tensor.form.layout, tensor.shape, target)
    rule = movement.reshape(tensor.shape, target, sharded)

    def over(engine: Engine, chosen: Sharding) -> Compute:
        local = chosen.results[0].local_shape(target, engine.world.position)

        def compute(parts: Parts) -> Sequence[torch.Tensor]:
            return (parts[0].reshape(target if parts[0].shape == tensor.shape else local),)

        return compute

    return Task(rule, [tensor], result_shapes=(target,), linear_in=(0,), of_weights=True, over=over)


def _as_strided(
    operator: Operator,
    tensor: Operand,
    sizes: Sequence[int],
    strides: Sequence[int],
    offset: int | None = None,
) -> Task | None:
    """Plans `as_strided` within each row, as the frames of a Fourier transform are taken.

    Raises:
        ShardedTensorError: If the tensor is sharded and not contiguous: the memory of no rank has
            its strides.
    """
    if not tensor.form.is_contiguous and not tensor.form.is_replicated:
        raise ShardedTensorError(
            "as_strided() takes a contiguous tensor if it is sharded, and got one of shape "
            f"{tensor.shape} with strides {tensor.form.strides}: give it x.contiguous()."
        )
    if not tensor.ndim or not sizes or offset or not tensor.form.is_contiguous:
        return None
    row = prod(tensor.shape[1:])
    last = sum((size - 1) * stride for size, stride in zip(sizes[1:], strides[1:], strict=True))
    if (sizes[0], strides[0]) != (tensor.shape[0], row) or last >= row:
        return None
    rule = movement.permute(tensor.ndim, [0, *[None] * (len(sizes) - 1)])

    def call(part: torch.Tensor) -> torch.Tensor:
        frames: torch.Tensor = operator(part.contiguous(), [part.shape[0], *sizes[1:]], strides)
        return frames

    return one_result(rule, tensor, call)


def _unfold(operator: Operator, tensor: Operand, dim: int, *window: int) -> Task:
    """Plans `unfold(dim, size, step)`, which puts windows along `dim` into a new last dim."""
    dims = [other if other != dim % tensor.ndim else None for other in range(tensor.ndim)]
    rule = movement.permute(tensor.ndim, [*dims, None])
    return one_result(rule, tensor, lambda part: operator(part, dim, *window))


def _unfold_backward(
    operator: Operator, gradient: Operand, sizes: Sequence[int], dim: int, *window: int
) -> Task:
    target_dim = dim % len(sizes)
    dims = [other if other != target_dim else None for other in range(len(sizes))]

    def call(part: torch.Tensor) -> torch.Tensor:
        local = [*part.shape[:target_dim], sizes[target_dim], *part.shape[target_dim + 1 : -1]]
        grad: torch.Tensor = operator(part, local, dim, *window)
        return grad

    return one_result(movement.permute(gradient.ndim, dims), gradient, call)


def _flip(_operator: Operator, tensor: Operand, dims: Sequence[int]) -> Task:
    rule = basic.along(tensor.ndim, frozenset(dim % tensor.ndim for dim in dims))
    return Task(rule, [tensor], linear_in=(0,), of_weights=True)


PLANNERS: dict[Any, Planner] = {
    torch_private.UNSAFE_VIEW: _reshape,
    **by_operator(
        {
            "view reshape": _reshape,
            "permute transpose.int t unsqueeze": _permute,
            "squeeze squeeze.dim squeeze.dims": _squeeze,
            "as_strided": _as_strided,
            "expand": _expand,
            "unfold": _unfold,
            "unfold_backward": _unfold_backward,
            "flip": _flip,
        }
    ),
}


@cache
def read_indices_by_operators() -> torch.library.Library:
    """Makes `tensor_split(x, indices)` read the indices by `tolist()`, for all tensors of CPUs.

    Torch reads their memory, which a sharded tensor does not have.

    Returns:
        The registration, which lasts as long as the process.
    """
    library = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]
    name = "tensor_split.tensor_indices_or_sections"
    library.impl(name, _cut_at_indices, "AutogradCPU")  # type: ignore[no-untyped-call]
    return library


def _cut_at_indices(tensor: torch.Tensor, indices: torch.Tensor, dim: int = 0) -> Any:
    if indices.dtype is not torch.int64 or indices.ndim > 1:
        raise LayoutError(
            "tensor_split expected places or a number of parts as int64 of at most one dim, got "
            f"{indices.dtype} of {indices.ndim} dims.",
            got=str(indices.dtype),
        )
    return torch.tensor_split(tensor, indices.tolist(), dim)
