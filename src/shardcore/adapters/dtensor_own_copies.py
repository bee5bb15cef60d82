"""Views that are copies on this rank alone: they follow their base here, without communication.

Known for torch 2.13. A rank's part may lie in memory otherwise than its DTensor says, if somebody
made the DTensor of it so. A view of the whole is then a copy of the part, and no other rank knows.
"""

import weakref
from collections.abc import Sequence

import torch

from shardcore.domain.errors import StrategyError

# By the memory of a copy: the part that it is a copy of, in another shape.
_PART: "weakref.WeakKeyDictionary[torch.UntypedStorage, torch.Tensor]" = weakref.WeakKeyDictionary()
# By the memory of a part: that of its copies.
_COPIES: "weakref.WeakKeyDictionary[torch.UntypedStorage, weakref.WeakSet[torch.UntypedStorage]]"
_COPIES = weakref.WeakKeyDictionary()


def viewed(part: torch.Tensor, results: Sequence[torch.Tensor]) -> None:
    """Note views that do not share the memory of `part`, which they were to be views of."""
    memory = part.untyped_storage()
    for each in results:
        if each.untyped_storage() is not memory:
            _PART[each.untyped_storage()] = part.detach()
            _COPIES.setdefault(memory, weakref.WeakSet()).add(each.untyped_storage())


def origin(memory: torch.UntypedStorage) -> torch.UntypedStorage:
    """Where the values of `memory` are kept: there, unless it is such a copy."""
    while _PART and memory in _PART:
        memory = _PART[memory].untyped_storage()
    return memory


def check_shared(memory: torch.UntypedStorage) -> None:
    """Refuse such a copy, where its place in the memory of its base is asked for.

    Raises:
        StrategyError: If `memory` is one.
    """
    if memory in _PART:
        part = _PART[memory]
        raise StrategyError(
            f"A view of a view is taken, of a DTensor whose part on this rank, of shape "
            f"{tuple(part.shape)}, has strides {part.stride()}: a view of it is a copy. Make the "
            "part contiguous() before the DTensor is made of it."
        )


def written(memory: torch.UntypedStorage) -> None:
    """Bring what shares its values with `memory` up to date after a write there."""
    if not _PART:
        return
    if memory in _PART:
        part = _in_memory(_PART[memory])
        part.copy_(_copy_of(part, memory))
        written(part.untyped_storage())
    else:
        _refresh(memory)


def _refresh(memory: torch.UntypedStorage) -> None:
    for copy in list(_COPIES.get(memory, ())):
        part = _in_memory(_PART[copy])
        _copy_of(part, copy).copy_(part)
        _refresh(copy)


def _in_memory(part: torch.Tensor) -> torch.Tensor:
    """`part`, to be written where torch would not let one, such as after inference mode."""
    return _lying(part, part.untyped_storage(), int(part.storage_offset()), part.stride())


def _copy_of(part: torch.Tensor, memory: torch.UntypedStorage) -> torch.Tensor:
    """The copy in `memory`, in the shape of `part`: a copy has no gaps."""
    return _lying(part, memory, 0, torch.empty(part.shape, device="meta").stride())


def _lying(
    like: torch.Tensor, memory: torch.UntypedStorage, offset: int, strides: tuple[int, ...]
) -> torch.Tensor:
    tensor = torch.empty(0, dtype=like.dtype, device=like.device)
    return tensor.set_(memory, offset, like.shape, strides)
