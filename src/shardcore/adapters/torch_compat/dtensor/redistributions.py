"""What DTensor moves from one layout into another, told as it happens."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch.distributed.tensor import _api, _dispatch, _redistribute

Around = Callable[[torch.Tensor, Any, Any], AbstractContextManager[None]]

# torch 2.13: the modules that hold the function by which every redistribution moves tensors.
_REDISTRIBUTING: tuple[Any, ...] = (_api, _dispatch, _redistribute)


@contextmanager
def around_redistributions(around: Around) -> Iterator[None]:
    """Run each redistribution in a scope.

    torch 2.13: no public hook is called before one.

    Args:
        around: Gives the scope, of this rank's part and the specs before and after.
    """
    kept = [module.redistribute_local_tensor for module in _REDISTRIBUTING]

    def redistribute(local: torch.Tensor, current: Any, target: Any, *args: Any, **kw: Any) -> Any:
        with around(local, current, target):
            return kept[0](local, current, target, *args, **kw)

    for module in _REDISTRIBUTING:
        module.redistribute_local_tensor = redistribute
    try:
        yield
    finally:
        for module, function in zip(_REDISTRIBUTING, kept, strict=True):
            module.redistribute_local_tensor = function
