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
        places: Where numbers, flags, names, functions, lists and tensors are held.
        values: What they were.
        sized: The lists, sets and dicts among the values.
        sizes: How long they were.
        listed: Those of them that hold plain values, with all that they hold.
        memories: Where in memory the tensors lie that are held.
        seed: The state of Keras' global generator.
    """

    places: list[Place]
    values: list[Any]
    sized: list[Any]
    sizes: list[int]
    listed: list[tuple[Any, tuple[Any, ...]]]
    memories: frozenset[Any]
    seed: Any

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
        keys = [each.key for each in places if isinstance(each.holder[each.key], list | dict | set)]
        with torch.no_grad():
            parts = (local(each) for each in values if isinstance(each, torch.Tensor))
            memories = {_memory(each) for each in parts if each.layout is torch.strided}
        held = [(each, _members(each)) for each in sized]
        # What a user's list or dict holds is what a step may leave there; Keras' own hold losses.
        listed = [
            (each, members)
            for (each, members), key in zip(held, keys, strict=True)
            if _any_plain(members) or not str(key).startswith("_")
        ]
        sizes = list(map(len, sized))
        return cls(places, values, sized, sizes, listed, frozenset(memories), seams.global_seed())

    def holds(self, tensor: torch.Tensor) -> bool:
        """Whether `tensor` is held by somebody."""
        return _memory(tensor) in self.memories

    def change(self) -> str:
        """The first place where something else is held by now, empty if there is none.

        It is asked at every step, of thousands of places: identity is compared first.
        """
        if seams.global_seed() is not self.seed:
            return "Keras' global seed generator"
        now = [each.holder.get(each.key) for each in self.places]
        sizes = list(map(len, self.sized))
        listed = [_members(each) for each, _ in self.listed]
        if (
            all(map(is_, now, self.values))
            and sizes == self.sizes
            and all(all(map(is_, a, b)) for a, (_, b) in zip(listed, self.listed, strict=True))
        ):
            return ""
        for place, new, value in zip(self.places, now, self.values, strict=True):
            if not _same(new, value):
                return place.name
        for container, size in zip(self.sized, self.sizes, strict=True):
            if len(container) != size:
                return self._name(container)
        for members, (container, before) in zip(listed, self.listed, strict=True):
            if not all(_same(a, b) for a, b in zip(members, before, strict=True)):
                return self._name(container)
        return ""

    def _name(self, container: Any) -> str:
        names = zip(self.places, self.values, strict=True)
        return next(place.name for place, value in names if value is container)


def _members(container: Any) -> tuple[Any, ...]:
    return tuple(container.values() if isinstance(container, dict) else container)


def _any_plain(members: tuple[Any, ...]) -> bool:
    return any(map(_is_plain, members))


def _is_plain(value: Any) -> bool:
    return isinstance(value, _PLAIN)


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
    for name, module in seams.modules_of(trainer):
        for holder in (module._parameters, module._buffers):
            for key in holder:
                yield Place(holder, key, f"{key!r} of torch module {name!r}")
    visited: set[int] = set()
    torch_modules = [each for _, each in seams.modules_of(trainer) if not seams.is_layer(each)]
    roots = [*seams.parts_of(trainer), *torch_modules]
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
