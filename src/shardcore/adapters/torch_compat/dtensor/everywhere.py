"""What DTensor does on every thread: the backward pass, and the collectives of a redistribution."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch.distributed.tensor import DTensor, _api, _dispatch, _redistribute
from torch.distributed.tensor._dtensor_spec import DTensorSpec

from shardcore.adapters.torch_compat.dtensor import strided
from shardcore.adapters.torch_compat.while_used import WhileUsed


class EveryThread(WhileUsed):
    """Changes to DTensor that hold on every thread, while at least one scope asks for them.

    torch 2.13: whether a plain tensor is promoted is read, in C++, from a flag of the thread, so
    `loss.backward()` on a thread without it fails at the first plain tensor that was saved; the
    public `implicit_replication()` takes the flag away from the scopes around it; and no public
    hook is called before a collective.

    Args:
        around_backward: The scope in which `tensor.backward()` runs.
        before_collective: Called before a redistribution that communicates.
        keeps_promotion: Whether this thread keeps its flag when it is told to drop it.
    """

    def __init__(
        self,
        around_backward: Callable[[], AbstractContextManager[None]],
        before_collective: Callable[[], None],
        keeps_promotion: Callable[[], bool],
    ) -> None:
        self._around_backward = around_backward
        self._before_collective = before_collective
        self._keeps_promotion = keeps_promotion

    def _put(self) -> None:
        around, keeps = self._around_backward, self._keeps_promotion

        def backward(tensor: DTensor, *args: Any, **kwargs: Any) -> None:
            with around():
                _TORCHS_BACKWARD(tensor, *args, **kwargs)

        def allow(_dispatcher: Any, value: bool) -> None:
            torch._C._set_dtensor_allow_implicit_replication(value or keeps())

        dtensor: Any = DTensor
        dtensor.backward = backward
        dispatcher: Any = _dispatch.OpDispatcher
        dispatcher._allow_implicit_replication = _TORCHS_PROPERTY.setter(allow)
        for module in _REDISTRIBUTING:
            module.redistribute_local_tensor = self._redistribute

    def _take_back(self) -> None:
        dtensor: Any = DTensor
        del dtensor.backward
        dispatcher: Any = _dispatch.OpDispatcher
        dispatcher._allow_implicit_replication = _TORCHS_PROPERTY
        for module in _REDISTRIBUTING:
            module.redistribute_local_tensor = _TORCHS_REDISTRIBUTE

    def _redistribute(
        self, local: torch.Tensor, current: DTensorSpec, target: DTensorSpec, *args: Any, **kw: Any
    ) -> Any:
        strided.tell_views(current, target)
        if _communicates(current, target):
            self._before_collective()
        return _TORCHS_REDISTRIBUTE(local, current, target, *args, **kw)


# torch 2.13: the modules that hold the function by which every redistribution moves tensors.
_REDISTRIBUTING: tuple[Any, ...] = (_api, _dispatch, _redistribute)
_TORCHS_BACKWARD: Any = torch.Tensor.backward
_TORCHS_REDISTRIBUTE: Any = _redistribute.redistribute_local_tensor
_TORCHS_PROPERTY: Any = vars(_dispatch.OpDispatcher)["_allow_implicit_replication"]


def _communicates(current: DTensorSpec, target: DTensorSpec) -> bool:
    """Whether more is done than to cut what each rank has whole."""
    return any(
        size > 1 and not before.is_replicate() and before != after
        for size, before, after in zip(
            current.mesh.shape, current.placements, target.placements, strict=True
        )
    )
