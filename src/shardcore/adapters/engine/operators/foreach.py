"""Operators on lists of tensors, such as the update of an optimizer."""

from typing import Any

import torch

from shardcore.adapters import torch_private
from shardcore.adapters.engine import writes
from shardcore.adapters.engine.operators.reductions import squares
from shardcore.adapters.engine.redistribution import full, reduced
from shardcore.adapters.engine.tensor import ShardedTensor
from shardcore.adapters.torch_private import is_fused, tree_map_only, writes_first, written_operands
from shardcore.adapters.torch_private.operators import Operator
from shardcore.domain.engine.rules.rule import fits
from shardcore.domain.errors import ShardedTensorError


def on_list(operator: Operator, *args: Any, **kwargs: Any) -> Any:
    """Runs `_foreach_add(tensors, ...)` and similar on the tensors at each index of the lists."""
    if operator == torch_private.LIST_NORM:
        return _norms(*args, **kwargs)
    if not writes_first(operator):
        return _run_out_of_place(operator, args, kwargs)
    if any(isinstance(tensor, ShardedTensor) and tensor.copied is not None for tensor in args[0]):
        for at in range(len(args[0])):
            _write(operator, tuple(_at_index(at, arg, len(args[0])) for arg in args), kwargs)
    else:
        _write(operator, args, kwargs)
    return None


def _norms(tensors: list[Any], order: float = 2, dtype: torch.dtype | None = None) -> list[Any]:
    """Computes the norm of each tensor, for gradient clipping; the usual norms by one reduction."""
    norms: list[Any] = [None] * len(tensors)
    alike: dict[Any, list[int]] = {}
    for at, tensor in enumerate(tensors):
        if isinstance(tensor, ShardedTensor) and order == 2 and tensor.form.dtype.is_floating_point:
            norms[at] = squares(tensor, dtype or tensor.form.dtype)
            alike.setdefault((norms[at].form.layout, norms[at].dtype), []).append(at)
        else:
            norms[at] = torch.linalg.vector_norm(tensor, order, dtype=dtype)
    for indices in alike.values():
        totals = [norms[at] for at in indices]
        if totals[0].form.is_pending:
            totals = reduced(torch.stack(totals)).unbind()
        for at, total in zip(indices, totals, strict=True):
            norms[at] = total.sqrt().to(dtype or tensors[at].dtype)
    return norms


def _run_out_of_place(
    operator: Operator, args: tuple[object, ...], kwargs: dict[str, object]
) -> list[Any]:
    """Runs `operator`; each result has the layout of one of its operands."""
    lists = [arg for arg in args if isinstance(arg, list | tuple) and arg]
    tensors = [operand for operand in lists if isinstance(operand[0], torch.Tensor)]
    # The results get the layout of the largest sharded operand, else of the first one.
    targets = [
        reduced(max(row, key=lambda one: (isinstance(one, ShardedTensor), one.ndim)))
        for row in zip(*tensors, strict=True)
    ]
    operands = (zip(operand, targets, strict=True) for operand in tensors)
    if not all(fits(tensor.shape, target.shape) for pairs in operands for tensor, target in pairs):
        raise ShardedTensorError(
            f"{operator} does not keep the shapes of its tensors, and cannot run on a list of "
            "sharded tensors: call the operator on each tensor."
        )
    outputs = operator(*(_local_operand(arg, targets) for arg in args), **kwargs)
    return [
        target.engine.sharded(part, target.form.layout, target.form.shape, target.form.weight)
        if isinstance(target, ShardedTensor)
        else part
        for part, target in zip(outputs, targets, strict=True)
    ]


def _write(operator: Operator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Writes into each of the first list; into a view that is a copy only if it is alone there."""
    targets, *others = args
    first = targets[0]
    if isinstance(first, ShardedTensor) and first.copied is not None:
        plain = tree_map_only(ShardedTensor, full, others)
        writes.write_through(first, lambda view: operator([view], *plain, **kwargs))
        return
    written = [
        target
        for target in written_operands(operator, args, kwargs)
        if isinstance(target, ShardedTensor)
    ]
    if is_fused(operator) and not _are_alike(args):
        writes.run_full_and_store(operator, *args, **kwargs)
        return
    for target in written:
        writes.reduce_in_place(target)
    operands = [_local_operand(arg, targets) for arg in args]
    if is_fused(operator):  # it expects gradients with the strides of its targets
        operands[1] = [gradient.contiguous() for gradient in operands[1]]
    operator(*operands, **{name: _local_operand(arg, targets) for name, arg in kwargs.items()})
    for target in written:
        target.memory.writes += 1


def _are_alike(args: tuple[object, ...]) -> bool:
    """Compares the layouts of moments and sums of a fused operator with those of its variables."""
    variables, _gradients, *states = (arg for arg in args if isinstance(arg, list | tuple))
    pairs = (pair for moments in states for pair in zip(variables, moments, strict=False))
    return all(
        isinstance(moment, ShardedTensor) and writes.is_alike(variable, moment)
        for variable, moment in pairs
        if isinstance(variable, ShardedTensor) and moment.ndim
    )


def _at_index(at: int, operand: object, count: int) -> Any:
    """Takes the list of the one element at `at`, if `operand` is a list of `count` elements."""
    if isinstance(operand, list | tuple) and len(operand) == count:
        return [operand[at]]
    return operand


def _local_operand(operand: object, targets: list[Any]) -> Any:
    if isinstance(operand, ShardedTensor):
        return full(operand)
    if isinstance(operand, list | tuple) and operand and isinstance(operand[0], torch.Tensor):
        return [
            _local_value(tensor, target) for tensor, target in zip(operand, targets, strict=True)
        ]
    return operand


def _local_value(value: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    if isinstance(target, ShardedTensor):
        return target.part if value is target else writes.shard_like(value, target)
    return full(value) if isinstance(value, ShardedTensor) else value
