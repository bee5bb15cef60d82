"""Views of a split dim, which are copies: a write reaches the base, and every view of it.

Known for torch 2.13. For `row = x[0]` of a tensor that is split over dim 0, DTensor gathers `x`
first. Autograd takes the row for a view of `x`, but it is one of the gathered copy.
"""

import weakref
from collections.abc import Sequence
from typing import Any

import attrs
import torch
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Partial, Placement, Replicate

from shardcore.adapters import dtensor_own_copies, fallback, torch_compat
from shardcore.adapters.dtensor_gathered import GATHERED
from shardcore.adapters.dtensor_trust import DISTRUSTED, is_split, put_in, replicated
from shardcore.adapters.torch_compat import dtensor as dtensor_compat


@attrs.frozen
class _Place:
    """Where in its storage a part lies, and of which tensor it is the part."""

    size: torch.Size
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    mesh: Any
    placements: tuple[Placement, ...]
    shape: torch.Size
    strides: tuple[int, ...]

    @classmethod
    def of(cls, part: torch.Tensor, tensor: DTensor, placements: Sequence[Placement]) -> "_Place":
        return cls(
            part.shape,
            part.stride(),
            int(part.storage_offset()),
            part.dtype,
            tensor.device_mesh,
            tuple(placements),
            tensor.shape,
            tensor.stride(),
        )

    def on(self, storage: torch.UntypedStorage) -> DTensor:
        """The tensor whose part lies here in `storage`."""
        part = torch.empty(0, dtype=self.dtype, device=storage.device)
        part.set_(storage, self.offset, self.size, self.stride)
        return DTensor.from_local(
            part,
            self.mesh,
            self.placements,
            run_check=False,
            shape=self.shape,
            stride=self.strides,
        )


@attrs.frozen
class _Copy:
    """A tensor at `source` that was redistributed: the copy lies at `target` of other memory."""

    source: _Place
    target: _Place

    def take(self, storage: torch.UntypedStorage) -> torch.UntypedStorage:
        """The memory of a copy of what is in `storage` now."""
        tensor = self.source.on(storage)
        moved = tensor.redistribute(placements=self.target.placements)
        return dtensor_compat.local_tensor(moved).untyped_storage()

    def give_back(self, copied: torch.UntypedStorage, storage: torch.UntypedStorage) -> None:
        """Overwrite what is in `storage` by the copy."""
        put_in(self.source.on(storage), self.target.on(copied))


_Path = tuple[_Copy, ...]
# By the memory of a base: the copies that were made for views of it, in the order of making, which
# is that of the program on every rank.
_Copies = dict[_Path, "list[weakref.ref[torch.UntypedStorage]]"]
_TAKEN: "weakref.WeakKeyDictionary[torch.UntypedStorage, _Copies]" = weakref.WeakKeyDictionary()
# By the memory of a copy: that of its base, which a view keeps alive, and the way from there.
_ORIGIN: "weakref.WeakKeyDictionary[torch.UntypedStorage, tuple[torch.UntypedStorage, _Path]]" = (
    weakref.WeakKeyDictionary()
)


def taken(tensor: DTensor, placements: Sequence[Placement], part: torch.Tensor) -> None:
    """Note that `tensor` has been copied so that views of it can be taken.

    Args:
        tensor: The sharded tensor.
        placements: What it was brought into.
        part: What this rank has of it then; the views share its memory.
    """
    own = dtensor_compat.local_tensor(tensor)
    storage, memory = own.untyped_storage(), part.untyped_storage()
    dtensor_own_copies.check_shared(storage)
    base, path = _ORIGIN.get(storage, (storage, ()))
    step = _Copy(_Place.of(own, tensor, tensor.placements), _Place.of(part, tensor, placements))
    copies = _TAKEN.setdefault(base, {}).setdefault((*path, step), [])
    copies[:] = [each for each in copies if each() is not None]
    copies.append(weakref.ref(memory))
    _ORIGIN[memory] = (base, (*path, step))


def _view_of_whole(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A view that is taken of the whole only: `as_strided`, bits of a pending sum."""
    if not DISTRUSTED[operator]((args, kwargs)):
        return dtensor_compat.as_torch_does(operator, args, kwargs)
    tensor, *rest = args
    if is_split(tensor):
        fallback.tell(operator, args)
    with torch.no_grad():
        moved = tensor.redistribute(placements=[Replicate()] * tensor.device_mesh.ndim)
    part = dtensor_compat.local_tensor(moved)
    if dtensor_compat.moves(tensor, moved.placements):
        taken(tensor, moved.placements, part)
    return replicated(operator(part, *rest, **kwargs), tensor.device_mesh)


HANDLERS: dict[Any, torch_compat.Handler] = {
    operator: _view_of_whole for operator in DISTRUSTED if torch_compat.is_view(operator)
}


def is_copied_view(tensor: Any) -> bool:
    """Whether `tensor` is a view above, and lies in a copy below."""
    return isinstance(tensor, DTensor) and _memory(tensor) in _ORIGIN


def catch_up(tensor: DTensor) -> None:
    """Bring a copied view up to date before it is written into.

    Its base may have been written where nobody looks, such as through `to_local()`.
    """
    base, path = _ORIGIN[_memory(tensor)]
    with torch.no_grad():
        _take_again(base, path, [weakref.ref(_memory(tensor))])


def spread(tensor: DTensor) -> None:
    """Bring the base of `tensor`, and all views of it, up to date after a write into `tensor`."""
    memory = _memory(tensor)
    base, path = _ORIGIN.get(memory, (memory, ()))
    GATHERED.written(memory)
    GATHERED.written(base)
    with torch.no_grad():
        dtensor_own_copies.written(dtensor_compat.local_tensor(tensor).untyped_storage())
        if path:
            _give_back(base, path, memory)
            dtensor_own_copies.written(base)
        _refresh(base, tensor)


def _memory(tensor: DTensor) -> torch.UntypedStorage:
    return dtensor_own_copies.origin(dtensor_compat.local_tensor(tensor).untyped_storage())


def _give_back(base: torch.UntypedStorage, path: _Path, memory: torch.UntypedStorage) -> None:
    way = [base]
    for step in path[:-1]:
        way.append(step.take(way[-1]))
    for step, storage in reversed(list(zip(path, way, strict=True))):
        step.give_back(memory, storage)
        memory = storage


def _refresh(base: torch.UntypedStorage, tensor: DTensor) -> None:
    """Bring the copies of `base` up to date.

    The ranks agree on which are still alive somewhere, by one small reduction, and take those
    again together. Without copies nothing is communicated.
    """
    copies = _TAKEN.get(base)
    if not copies:
        return
    alive = _alive_anywhere(copies, tensor)
    for path, held in zip(list(copies), alive, strict=True):
        if held:
            _take_again(base, path, copies[path])
        else:
            del copies[path]


def _alive_anywhere(copies: _Copies, tensor: DTensor) -> list[bool]:
    held = [any(copy() is not None for copy in each) for each in copies.values()]
    mesh = tensor.device_mesh
    part = torch.tensor(held, dtype=torch.int32, device=tensor.device)
    flags = DTensor.from_local(part, mesh, [Partial("max")] * mesh.ndim, run_check=False)
    return [bool(flag) for flag in flags.full_tensor().tolist()]


def _take_again(base: torch.UntypedStorage, path: _Path, copies: list[Any]) -> None:
    storage = base
    for step in path:
        storage = step.take(storage)
    for copy in copies:
        memory = copy()
        if memory is not None and memory.data_ptr() != storage.data_ptr():
            memory.copy_(storage)
            dtensor_own_copies.written(memory)
