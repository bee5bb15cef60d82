"""Operators on sharded tensors as they run, and which forward operator a backward one is of."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch

from shardcore.adapters.torch_compat.listening import CollectiveListener, Started, is_sharded


class OperatorWatch(CollectiveListener):  # type: ignore[no-untyped-call]
    """A `CollectiveListener` that also runs each operator on sharded tensors in a scope.

    Args:
        listen: Called with each collective.
        around: Gives, of an operator and its operands, the scope that it runs in. The value of the
            scope is called with the result.
    """

    def __init__(
        self,
        listen: Callable[[Started], None],
        around: Callable[[Any, Any], AbstractContextManager[Callable[[Any], None]]],
    ) -> None:
        super().__init__(listen)
        self._around = around
        self._handed_on = False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if not is_sharded(types):
            return super().__torch_dispatch__(func, types, args, kwargs)
        if self._handed_on:
            self._handed_on = False
            return NotImplemented
        with self._around(func, (args, kwargs)) as returned, self:
            self._handed_on = True
            result = func(*args, **(kwargs or {}))
        returned(result)
        return result


def nodes_made() -> int:
    """How many nodes of backward passes this thread has made: the next one gets this number.

    torch 2.13: the number has no public name.
    """
    autograd: Any = torch.autograd
    return int(autograd._get_sequence_nr())


def current_node() -> int | None:
    """The number of the node whose backward runs on this thread; None outside, and for a leaf's.

    torch 2.13: neither the node nor its number has a public name. The node that accumulates the
    gradient of a leaf has the largest number there is.
    """
    node: Any = torch._C._current_autograd_node()
    if node is None or accumulated() is not None:
        return None
    return int(node._sequence_nr())


def accumulated() -> torch.Tensor | None:
    """The leaf whose gradient is being accumulated on this thread, None where it is none.

    torch 2.13: as for `current_node`.
    """
    leaf: torch.Tensor | None = getattr(torch._C._current_autograd_node(), "variable", None)
    return leaf
