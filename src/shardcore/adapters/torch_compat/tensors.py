"""Backward passes, the store of the job, and the writes into a tensor."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store


def backward_pass() -> int:
    """The number of the backward pass that runs on this thread now.

    torch 2.13: it has no public name. A pass that fails calls nobody at its end.
    """
    return int(torch._C._current_graph_task_id())


def after_backward(call: Callable[[], None]) -> None:
    """Call `call` when the backward pass that runs now is through.

    torch 2.13: the engine has no public name. `DistributedDataParallel` ends its passes so.
    """
    torch.autograd.Variable._execution_engine.queue_callback(call)


def store_for_thread(prefix: str) -> Store:
    """A connection of its own to the store of the default group, its keys under `prefix`.

    A store of our own would need a second address. A wait on a shared connection blocks every
    other thread; `clone` makes another.
    """
    group: Any = dist.group.WORLD  # the stubs of torch know neither the store nor `clone`
    return PrefixStore(prefix, group.get_group_store().clone())


def version_of(tensor: torch.Tensor) -> int:
    """The number of writes into the memory of `tensor` that torch has counted.

    torch 2.13: `_version` has no public name. A tensor made in inference mode has none.
    """
    return 0 if tensor.is_inference() else tensor._version
