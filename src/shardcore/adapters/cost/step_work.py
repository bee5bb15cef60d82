"""The work of an operator that runs on tensors without values: its operations and bytes."""

from collections.abc import Hashable
from typing import Any

import torch
from torch.utils.flop_counter import flop_registry

from shardcore.adapters import torch_private
from shardcore.domain.cost.events import Work

# The operators that only allocate.
_ALLOCATES = ("empty", "new_empty")
# The namespace of questions about a tensor, such as its device.
_QUESTIONS = "prim"


def is_work(operator: torch_private.Operator) -> bool:
    """Leaves out views, allocations, collectives and questions such as `prim::device`."""
    name = str(operator)
    return not (
        torch_private.is_of_collectives(operator)
        or torch_private.is_view(operator)
        or name.startswith(_QUESTIONS)
        or name.partition(".")[2].startswith(_ALLOCATES)
    )


def work_of(
    operator: torch_private.Operator, operands: object, result: object, updates: bool
) -> Work:
    """Counts the operations and bytes of an operator with operands `(args, kwargs)`.

    `updates` says whether it belongs to the update of the optimizer.
    """
    moved = sum(map(size_of, touched_tensors(operator, operands, result)))
    flops = _flops(operator, operands, result)
    return Work(str(operator), dtype_of((operands, result)), flops, moved, updates)


def touched_tensors(
    operator: torch_private.Operator, operands: Any, result: object
) -> list[torch.Tensor]:
    """Lists the tensors that an operator reads and writes; written operands come twice."""
    args, kwargs = operands
    read = _unique_tensors((args, kwargs))
    written = _unique_tensors(torch_private.written_operands(operator, args, kwargs))
    memories = {torch_private.memory_of(tensor) for tensor in read}
    made = [
        tensor for tensor in tensors_in(result) if torch_private.memory_of(tensor) not in memories
    ]
    return [*read, *written, *made]


def _unique_tensors(nest: object) -> list[torch.Tensor]:
    return list({_elements(tensor): tensor for tensor in tensors_in(nest)}.values())


def _elements(tensor: torch.Tensor) -> Hashable:
    elements = torch_private.memory_of(tensor), tensor.storage_offset()
    return *elements, tuple(tensor.shape), tensor.stride(), tensor.dtype


def size_of(tensor: torch.Tensor) -> int:
    """Counts the bytes of a tensor in memory; expanded dims count once."""
    return int(min(tensor.nbytes, tensor.untyped_storage().nbytes()))


def dtype_of(nest: object) -> str:
    """Chooses the dtype in which an operator computes: that of its first floating tensor."""
    tensors = tensors_in(nest)
    floating = (tensor for tensor in tensors if tensor.dtype.is_floating_point)
    return str(next(floating, tensors[0]).dtype).removeprefix("torch.")


def tensors_in(nest: object) -> list[torch.Tensor]:
    """Leaves out tensors without elements."""
    leaves = torch_private.tree_leaves(nest)
    return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.numel()]


def _flops(operator: torch_private.Operator, operands: Any, result: Any) -> int:
    """Counts operations of products, convolutions and attention as torch does; 0 for all else.

    torch counts attention on CUDA only; the operator for CPUs has the same first operands.
    """
    packet: Any = operator.overloadpacket
    name = str(packet).rpartition(".")[2]
    if "for_cpu" in name:
        packet = getattr(torch.ops.aten, name.replace("for_cpu", "").replace("__", "_").rstrip("_"))
    formula = flop_registry.get(packet)
    args, kwargs = operands
    return 0 if formula is None else int(formula(*args, **kwargs, out_val=result))
