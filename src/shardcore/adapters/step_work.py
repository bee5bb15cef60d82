"""The operators of a step that runs on tensors without values: their operations and bytes."""

from collections import Counter
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import attrs
import torch
from torch.utils.flop_counter import flop_registry

from shardcore.adapters import torch_private
from shardcore.domain.traced_step import Work

# The operators that only allocate.
_ALLOCATES = ("empty", "new_empty")
# The namespace of questions about a tensor, such as its device.
_QUESTIONS = "prim"


@attrs.define(eq=False)
class StepWork:
    """The port `WorkTracer`: it watches the operands and the results of all operators."""

    _seen: Counter[Work] = attrs.field(factory=Counter, init=False)
    _updates: bool = attrs.field(default=False, init=False)

    def tracing(self) -> AbstractContextManager[Any]:
        """Opens a context in which operators are noted."""
        return torch_private.ResultListener(self._saw)

    @contextmanager
    def updating(self) -> Iterator[None]:
        """Opens the update of the optimizer."""
        self._updates = True
        try:
            yield
        finally:
            self._updates = False

    def work(self) -> tuple[Work, ...]:
        """Returns the operators, equal ones once with their number."""
        return tuple(attrs.evolve(each, times=times) for each, times in self._seen.items())

    def _saw(self, operator: torch_private.Operator, operands: Any, result: Any) -> None:
        name = str(operator)
        if torch_private.is_of_collectives(operator) or torch_private.is_view(operator):
            return
        if name.startswith(_QUESTIONS):
            return
        moved = _bytes(operator, operands, result)
        if moved and not name.partition(".")[2].startswith(_ALLOCATES):
            flops = _flops(operator, operands, result)
            self._seen[Work(name, _dtype(operands, result), flops, moved, self._updates)] += 1


def _flops(operator: torch_private.Operator, operands: Any, result: Any) -> int:
    """Returns the operations of a product, a convolution or an attention, as torch counts them.

    torch counts those of attention on CUDA only; that on CPUs has the same operands in front.
    """
    packet: Any = operator.overloadpacket
    name = str(packet).rpartition(".")[2]
    if "for_cpu" in name:
        packet = getattr(torch.ops.aten, name.replace("for_cpu", "").replace("__", "_").rstrip("_"))
    formula = flop_registry.get(packet)
    args, kwargs = operands
    return 0 if formula is None else int(formula(*args, **kwargs, out_val=result))


def _bytes(operator: torch_private.Operator, operands: Any, result: Any) -> int:
    """Returns the bytes that it reads and writes; written operands count twice."""
    args, kwargs = operands
    read = {id(each): each for each in _tensors((args, kwargs))}
    written = torch_private.written_operands(operator, args, kwargs)
    memories = {torch_private.memory_of(each) for each in read.values()}
    made = [each for each in _tensors(result) if torch_private.memory_of(each) not in memories]
    return sum(map(_size, [*read.values(), *_tensors(written), *made]))


def _size(tensor: torch.Tensor) -> int:
    """Returns the bytes of a tensor; those of an expanded one are in memory once."""
    return int(min(tensor.nbytes, tensor.untyped_storage().nbytes()))


def _dtype(operands: Any, result: Any) -> str:
    """Returns the dtype in which an operator computes: that of its first floating tensor."""
    tensors = [*_tensors(operands), *_tensors(result)]
    floating = (each for each in tensors if each.dtype.is_floating_point)
    return str(next(floating, tensors[0]).dtype).removeprefix("torch.")


def _tensors(nest: Any) -> list[torch.Tensor]:
    leaves = torch_private.tree_leaves(nest)
    return [each for each in leaves if isinstance(each, torch.Tensor) and each.numel()]
