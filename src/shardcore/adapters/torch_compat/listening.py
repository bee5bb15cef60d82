"""Every collective that a stretch of code starts."""

from collections.abc import Callable
from typing import Any

import attrs
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.utils._python_dispatch import TorchDispatchMode

from shardcore.adapters.torch_compat.trees import tree_leaves

# The stubs of torch do not export it.
_group_named: Any = distributed_c10d._resolve_process_group  # type: ignore[attr-defined]


@attrs.frozen(eq=False)
class Started:
    """A collective that this rank is about to start.

    Args:
        name: Its name: "all_reduce".
        operands: This rank's operands.
        group: The process group, in whatever form torch hands it on.
    """

    name: str
    operands: tuple[torch.Tensor, ...]
    group: Any

    @property
    def operand_bytes(self) -> int:
        """The bytes of the operands."""
        return sum(each.numel() * each.element_size() for each in self.operands)

    @property
    def processes(self) -> tuple[int, ...]:
        """The processes that take part, in the order of the group.

        torch 2.13: operators take a group by its name, which has no public look-up, or boxed.
        """
        group = self.group
        if isinstance(group, str):
            group = _group_named(group)
        elif isinstance(group, torch.ScriptObject):
            group = dist.ProcessGroup.unbox(group)
        return tuple(dist.get_process_group_ranks(group))


class CollectiveListener(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Tells `listen` of every collective of tensors that this thread starts.

    torch 2.13: `torch.distributed.tensor.debug.CommDebugMode` counts them too, but its module
    hooks fail on Keras layers, which call each other outside `torch.nn.Module.__call__`; and
    `TorchDispatchMode` and the operators of functional collectives have no public names.

    Args:
        listen: Called with each collective.
    """

    def __init__(self, listen: Callable[[Started], None]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._listen = listen

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if is_sharded(types):
            return NotImplemented  # a sharded tensor first: what it makes of it comes here next
        started = collective(func, args)
        if started is not None:
            self._listen(started)
        return func(*args, **(kwargs or {}))


def is_sharded(types: Any) -> bool:
    """Whether an operand knows a layout, by the types of an operator's operands."""
    return any(hasattr(kind, "placements") for kind in types)


def collective(func: Any, args: tuple[Any, ...]) -> Started | None:
    """The collective that the operator `func` is, None if it is another."""
    if func.namespace not in ("_c10d_functional", "_dtensor", "c10d"):
        return None
    name = moving(func._schema.name)
    if not name:
        return None
    names = [argument.name for argument in func._schema.arguments]
    operands = args[next(at for at, each in enumerate(names) if each in _OPERANDS)]
    group = args[next(at for at, each in enumerate(names) if each in _GROUPS)]
    tensors = (each for each in tree_leaves(operands) if isinstance(each, torch.Tensor))
    return Started(name, tuple(tensors), group)


def moving(name: str) -> str:
    """The collective of the operator `name`, such as "c10d::allreduce_"; empty if it is none."""
    return _COLLECTIVES.get(name.partition("::")[2].strip("_"), "")


# torch 2.13: what the schemas of the operators call the operands, and the group.
_OPERANDS = {"input", "inputs", "input_list", "input_tensor", "input_tensors", "tensor", "tensors"}
_GROUPS = {"group_name", "process_group"}

# torch 2.13: the operators that move tensors, without underscores at either end, with the name of
# the collective.
_COLLECTIVES = {
    "all_gather_into_tensor": "all_gather",
    "all_gather_into_tensor_coalesced": "all_gather",
    "all_gather_into_tensor_out": "all_gather",
    "all_reduce": "all_reduce",
    "all_reduce_coalesced": "all_reduce",
    "all_to_all_single": "all_to_all",
    "allgather": "all_gather",
    "allgather_base": "all_gather",
    "allgather_coalesced": "all_gather",
    "allgather_into_tensor_coalesced": "all_gather",
    "allreduce": "all_reduce",
    "allreduce_coalesced": "all_reduce",
    "alltoall": "all_to_all",
    "alltoall_base": "all_to_all",
    "broadcast": "broadcast",
    "reduce_scatter": "reduce_scatter",
    "reduce_scatter_base": "reduce_scatter",
    "reduce_scatter_tensor": "reduce_scatter",
    "reduce_scatter_tensor_coalesced": "reduce_scatter",
    "reduce_scatter_tensor_out": "reduce_scatter",
    "shard_dim_alltoall": "all_to_all",
}
