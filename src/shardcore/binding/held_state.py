"""What a step finds in Python: who holds the tensors that it reads, and what else it looks at."""

from collections.abc import Callable, Iterable, Iterator
from operator import is_
from types import FunctionType, MethodType, ModuleType
from typing import Any

import attrs
import torch

from shardcore.binding import seams
from shardcore.binding.agreement import variables_of

# How far from a layer, an optimizer, a metric or a loss an attribute is still looked at.
_DEPTH = 4
_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device)
_NOT_ENTERED = (type, ModuleType, FunctionType, MethodType, torch.Tensor)


@attrs.frozen
class Place:
    """An entry of a dict, or the attribute of an object, that the next step will look up again.

    Args:
        holder: The dict.
        key: The key in it.
        name: Whose it is, for people: "attribute 'rate' of Dropout 'dropout_1'".
    """

    holder: dict[Any, Any]
    key: Any
    name: str


@attrs.frozen
class HeldState:
    """What the objects of a model hold, as it was when a step was recorded.

    Args:
        places: Where numbers, flags, names, lists and tensors are held.
        values: What they were.
        sized: The lists, sets and dicts among the values.
        sizes: How long they were.
        memories: Where in memory the tensors lie that are held.
    """

    places: list[Place]
    values: list[Any]
    sized: list[Any]
    sizes: list[int]
    memories: frozenset[Any]

    @classmethod
    def of(cls, trainer: Any, local: Callable[[Any], Any]) -> "HeldState":
        """What `trainer`, its layers, optimizer, metrics and losses hold.

        Args:
            trainer: The model.
            local: Gives the plain tensor in which a tensor keeps its part.
        """
        places = list(_places(trainer))
        values = [each.holder[each.key] for each in places]
        sized = [each for each in values if isinstance(each, list | dict | set)]
        with torch.no_grad():
            memories = {_memory(local(each)) for each in values if isinstance(each, torch.Tensor)}
        return cls(places, values, sized, list(map(len, sized)), frozenset(memories))

    def holds(self, tensor: torch.Tensor) -> bool:
        """Whether `tensor` is held by somebody."""
        return _memory(tensor) in self.memories

    def change(self) -> str:
        """The first place where something else is held by now, empty if there is none.

        It is asked at every step, of thousands of places: identity is compared first.
        """
        now = [each.holder.get(each.key) for each in self.places]
        if all(map(is_, now, self.values)) and list(map(len, self.sized)) == self.sizes:
            return ""
        for place, new, value in zip(self.places, now, self.values, strict=True):
            if not _same(new, value):
                return place.name
        for container, size in zip(self.sized, self.sizes, strict=True):
            if len(container) != size:
                names = zip(self.places, self.values, strict=True)
                return next(place.name for place, value in names if value is container)
        return ""


def _memory(tensor: torch.Tensor) -> Any:
    """What the plain `tensor` and its views of the same elements share."""
    address = tensor.untyped_storage().data_ptr()
    return address, tensor.storage_offset(), tuple(tensor.shape), tensor.stride()


def _same(now: Any, then: Any) -> bool:
    if now is then:
        return True
    return isinstance(now, _PLAIN) and type(now) is type(then) and bool(now == then)


def _places(trainer: Any) -> Iterator[Place]:
    for variable in _variables(trainer):
        for key in ("_value", "_trainable"):
            yield Place(vars(variable), key, f"variable {variable.path!r}")
    for name, module in trainer.named_modules():
        for holder in (module._parameters, module._buffers):
            for key in holder:
                yield Place(holder, key, f"{key!r} of torch module {name!r}")
    visited: set[int] = set()
    roots = seams.parts_of(trainer)
    for root in roots:  # each by itself, however deep the others hold it
        visited |= {id(each) for each in roots}
        visited.discard(id(root))
        yield from _attributes(root, visited, 0)


def _variables(trainer: Any) -> Iterable[Any]:
    seed = seams.global_seed()
    return [*variables_of(trainer), *([] if seed is None else [seed])]


def _attributes(owner: Any, visited: set[int], depth: int) -> Iterator[Place]:
    """The attributes of `owner`, and of what it holds."""
    if id(owner) in visited or depth > _DEPTH:
        return
    visited.add(id(owner))
    if isinstance(owner, list | tuple | dict | set):
        members = owner.values() if isinstance(owner, dict) else owner
        for member in list(members):
            if _is_entered(member):
                yield from _attributes(member, visited, depth + 1)
        return
    told = f"{type(owner).__name__} {getattr(owner, 'name', '')!r}"
    for key, value in list(vars(owner).items()):
        if key in seams.RUNS_NOTED:
            continue
        if isinstance(value, (*_PLAIN, torch.Tensor, torch.Generator, list, dict, set, tuple)):
            yield Place(vars(owner), key, f"attribute {key!r} of {told}")
        if _is_entered(value):
            yield from _attributes(value, visited, depth + 1)


def _is_entered(value: Any) -> bool:
    """Whether what `value` holds is looked at too: not so for variables, which were."""
    if isinstance(value, list | tuple | dict | set):
        return True
    return (
        hasattr(value, "__dict__")
        and not isinstance(value, (*_PLAIN, *_NOT_ENTERED))
        and not seams.is_variable(value)
        and not seams.is_bookkeeping(value)
    )
