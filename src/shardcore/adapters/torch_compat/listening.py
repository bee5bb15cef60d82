"""Every collective that a stretch of code starts."""

from collections.abc import Callable
from typing import Any

import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode


class CollectiveListener(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Tells `listen` of every collective of tensors that this thread starts.

    torch 2.13: `torch.distributed.tensor.debug.CommDebugMode` counts them too, but its module
    hooks fail on Keras layers, which call each other outside `torch.nn.Module.__call__`; and
    `TorchDispatchMode` and the operators of functional collectives have no public names.

    Args:
        listen: Called with the name of the collective ("all_reduce") and this rank's operand.
    """

    def __init__(self, listen: Callable[[str, torch.Tensor], None]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._listen = listen

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if any(hasattr(kind, "placements") for kind in types):
            return NotImplemented  # a sharded tensor first: what it makes of it comes here next
        if func.namespace in ("_c10d_functional", "c10d"):
            name = COLLECTIVES.get(func._schema.name.partition("::")[2])
            if name is not None:
                tensors = (a for a in pytree.tree_leaves(args) if isinstance(a, torch.Tensor))
                self._listen(name, next(tensors))
        return func(*args, **(kwargs or {}))


# torch 2.13: the operators that move tensors, with the name of the collective.
COLLECTIVES = {
    "all_gather_into_tensor": "all_gather",
    "all_reduce": "all_reduce",
    "all_to_all_single": "all_to_all",
    "reduce_scatter_tensor": "reduce_scatter",
    "allreduce_": "all_reduce",
    "allgather_": "all_gather",
    "_allgather_base_": "all_gather",
    "_reduce_scatter_base_": "reduce_scatter",
    "alltoall_base_": "all_to_all",
    "broadcast_": "broadcast",
}
