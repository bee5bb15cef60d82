"""Views of a split dim, which are copies: a write reaches the base, and every view of it.

Known for torch 2.13. `row = x[0]` of a tensor that is split over dim 0 is gathered first. Autograd
takes it for a view, but it has memory of its own.
"""

import weakref
from typing import Any

import attrs
import torch
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Partial

from shardcore.adapters import torch_compat
from shardcore.adapters.dtensor_trust import DISTRUSTED, run_whole, store, whole


@attrs.frozen
class _Place:
    """Where in its storage a part lies, and of which tensor it is the part."""

    size: torch.Size
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    mesh: Any
    placements: tuple[Any, ...]
    shape: torch.Size
    strides: tuple[int, ...]

    @classmethod
    def of(cls, tensor: DTensor) -> "_Place":
        part = torch_compat.local_tensor(tensor)
        return cls(
            part.shape,
            part.stride(),
            int(part.storage_offset()),
            part.dtype,
            tensor.device_mesh,
            tuple(tensor.placements),
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
class _Step:
    """A view that was taken of the tensor at `place`: one result of `operator`."""

    place: _Place
    operator: Any
    rest: tuple[Any, ...]
    named: tuple[tuple[str, Any], ...]
    index: int

    def take(self, storage: torch.UntypedStorage) -> torch.Tensor:
        """This rank's part of the view, of what is in `storage` now."""
        results = self.operator(self.place.on(storage), *self.rest, **dict(self.named))
        return torch_compat.local_tensor(results[self.index] if _is_many(results) else results)


_Path = tuple[_Step, ...]
# By the memory of a base: the views that were copies, and those copies, in the order of taking,
# which is that of the program on every rank. Nothing is kept alive.
_Copies = dict[_Path, "list[weakref.ref[torch.UntypedStorage]]"]
_TAKEN: "weakref.WeakKeyDictionary[torch.UntypedStorage, _Copies]" = weakref.WeakKeyDictionary()
# By the memory of a copy: that of its base, and the way from there.
_ORIGIN: "weakref.WeakKeyDictionary[torch.UntypedStorage, tuple[weakref.ref[Any], _Path]]" = (
    weakref.WeakKeyDictionary()
)


def taken(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any], parts: Any) -> None:
    """Note that the view `operator` of `args[0]` has been taken as a copy.

    Args:
        operator: The ATen operator.
        args: Its operands: the sharded tensor, and numbers.
        kwargs: More numbers.
        parts: What this rank stores of the result or results.
    """
    storage = torch_compat.local_tensor(args[0]).untyped_storage()
    origin, path = _ORIGIN.get(storage, (weakref.ref(storage), ()))
    base = origin()
    if base is None:  # nobody can write into it any more
        return
    numbers = torch_compat.frozen(args[1:]), torch_compat.frozen(tuple(kwargs.items()))
    for index, part in enumerate(parts if _is_many(parts) else [parts]):
        step = _Step(_Place.of(args[0]), operator, *numbers, index)
        memory = part.untyped_storage()
        copies = _TAKEN.setdefault(base, {}).setdefault((*path, step), [])
        copies[:] = [each for each in copies if each() is not None]
        copies.append(weakref.ref(memory))
        _ORIGIN[memory] = (origin, (*path, step))


def refresh(tensor: DTensor) -> None:
    """Bring the copies that were taken of `tensor` up to date, after a write into it.

    The ranks agree on which are still alive somewhere, by one small reduction, and take those
    again together. Without copies nothing is communicated.
    """
    storage = torch_compat.local_tensor(tensor).untyped_storage()
    copies = _TAKEN.get(storage)
    if not copies:
        return
    with torch.no_grad():
        alive = _alive_anywhere(copies, tensor)
        for path, held in zip(list(copies), alive, strict=True):
            if held:
                _take_again(storage, path, copies[path])
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
        part = step.take(storage)
        storage = part.untyped_storage()
    for copy in copies:
        memory = copy()
        if memory is not None and memory.data_ptr() != storage.data_ptr():
            memory.copy_(storage)


def _is_many(results: Any) -> bool:
    return isinstance(results, list | tuple)


def write(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """An operator that writes into its first operand, as on one device."""
    target = args[0]
    if not isinstance(target, DTensor):
        return run_whole(operator, args, kwargs)
    if _is_broken_view(target):
        return _write_through(operator, args, kwargs)
    result = _write_into(operator, args, kwargs)
    refresh(target)
    return result


def _write_into(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if operator in DISTRUSTED and DISTRUSTED[operator]((args, kwargs)):
        return run_whole(operator, args, kwargs)
    before = args[0].placements
    try:
        result = torch_compat.as_torch_does(operator, args, kwargs)
    except RuntimeError:  # "would change placements", before anything is written
        return run_whole(operator, args, kwargs)
    after = args[0].placements
    assert after == before, f"{operator} changed {before} to {after}"
    return result


def _write_many(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """An operator that writes into each of a list, such as the update of an optimizer."""
    result = torch_compat.as_torch_does(operator, args, kwargs)
    for tensor in args[0]:
        if isinstance(tensor, DTensor):
            refresh(tensor)
    return result


def _is_broken_view(tensor: DTensor) -> bool:
    """Whether `tensor` is a view for autograd, but a copy, as a slice of a split dim is."""
    base = torch_compat.base_of(tensor)
    return base is not None and _memory(tensor) != _memory(base)


def _memory(tensor: DTensor) -> int:
    return torch_compat.local_tensor(tensor).untyped_storage().data_ptr()


def _write_through(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Write into a view that does not share the memory of its base: all get the values."""
    target = args[0]
    stored = torch_compat.base_of(target)
    assert stored is not None, "only called with a view"
    with torch.no_grad():
        rest, named = torch_compat.tree_map_only(DTensor, whole, (args[1:], kwargs))
        base = whole(stored)
        view = torch_compat.same_view(target, base)
        operator(view, *rest, **named)
        store(stored, base)
        store(target, view)
        refresh(stored)
    return target


HANDLERS: dict[Any, torch_compat.Handler] = {
    **dict.fromkeys(torch_compat.writing_operators(), write),
    **dict.fromkeys(torch_compat.list_writing_operators(), _write_many),
}
