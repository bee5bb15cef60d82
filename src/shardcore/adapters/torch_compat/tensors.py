"""Tensors as views, and the store of the job."""

from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.distributed_c10d import PrefixStore, Store, _get_default_store


def base_of(tensor: torch.Tensor) -> torch.Tensor | None:
    """The sharded tensor that `tensor` is a view of; None if it is no view of one.

    torch 2.13: `_is_view` and `_base` are the only way to ask autograd.
    """
    base = tensor._base if tensor._is_view() else None
    return base if isinstance(base, type(tensor)) else None


def same_view(view: torch.Tensor, base: torch.Tensor) -> torch.Tensor:
    """What `view` is of its base, of another base.

    torch 2.13: `_view_func` asks first whether both bases are of one size, which fails for a
    sharded tensor and a plain one.
    """
    result: torch.Tensor = view._view_func_unsafe(base)
    return result


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

    torch 1.13 to 2.13: `distributed_c10d._get_default_store` has no public counterpart, and a
    store of our own would need a second address. A wait on a shared connection blocks every
    other thread; `clone` makes another.
    """
    store: Any = _get_default_store()  # the stubs of torch do not know `clone`
    return PrefixStore(prefix, store.clone())


def version_of(tensor: torch.Tensor) -> int:
    """The number of writes into the memory of `tensor` that torch has counted.

    torch 2.13: `_version` has no public name. A tensor made in inference mode has none.
    """
    return 0 if tensor.is_inference() else tensor._version
