"""What a step finds in Python: who holds the tensors that it reads, and what else it looks at."""

from collections.abc import Callable, Iterable, Iterator
from operator import is_
from typing import Any

import attrs
import numpy as np
import torch

from shardcore.binding import seams
from shardcore.binding.held_members import HeldMembers
from shardcore.binding.held_places import CONTAINERS, PLAIN, Place, places_of

# The content of a larger array is not looked at.
_MOST_BYTES = 4096


@attrs.frozen
class HeldState:
    """What the objects of a model hold, as it was when a step was recorded.

    Args:
        places: Where numbers, flags, names, functions, lists and tensors are held.
        values: What they were.
        whole: The dicts of which every entry is one of the places.
        apart: All other places.
        apart_values: What they were.
        sized: The lists, sets and dicts among the values.
        sizes: How long they were.
        listed: Those of them that hold plain values.
        arrays: Small arrays of NumPy.
        contents: What was in them.
        memories: Where in memory the tensors lie that are held.
        seed: The state of Keras' global generator.
    """

    places: list[Place]
    values: list[Any]
    whole: HeldMembers
    apart: list[Place]
    apart_values: list[Any]
    sized: list[Any]
    sizes: list[int]
    listed: HeldMembers
    arrays: list[Any]
    contents: list[bytes]
    memories: frozenset[Any]
    seed: Any

    @classmethod
    def of(cls, trainer: Any, local: Callable[[Any], Any]) -> "HeldState":
        """What `trainer`, its layers, optimizer, metrics and losses hold.

        Args:
            trainer: The model.
            local: Gives the plain tensor in which a tensor keeps its part.
        """
        places = list(places_of(trainer))
        values = _values(places)
        whole, apart = _whole_dicts(places)
        pairs = zip(places, values, strict=True)
        keyed = [(each.key, value) for each, value in pairs if _is_container(value)]
        sized = [value for _, value in keyed]
        # What a user's list or dict holds is what a step may leave there; Keras' own hold losses.
        listed = HeldMembers.of(
            each
            for key, each in keyed
            if _any_plain(_members(each)) or not str(key).startswith("_")
        )
        held = [*values, *listed.members]
        with torch.no_grad():
            parts = (local(each) for each in held if isinstance(each, torch.Tensor))
            memories = {_memory(each) for each in parts if each.layout is torch.strided}
        arrays = list({id(each): each for each in held if _is_small_array(each)}.values())
        return cls(
            places=places,
            values=values,
            whole=HeldMembers.of(whole),
            apart=apart,
            apart_values=_values(apart),
            sized=sized,
            sizes=list(map(len, sized)),
            listed=listed,
            arrays=arrays,
            contents=[each.tobytes() for each in arrays],
            memories=frozenset(memories),
            seed=seams.global_seed(),
        )

    def holds(self, tensor: torch.Tensor) -> bool:
        """Whether `tensor` is held by somebody."""
        return _memory(tensor) in self.memories

    def change(self) -> str:
        """The first place where something else is held by now, empty if there is none.

        It is asked at every step, of thousands of places: identity is compared first.
        """
        if seams.global_seed() is not self.seed:
            return "Keras' global seed generator"
        return "" if self._is_identical() else next(self._changes(), "")

    def _is_identical(self) -> bool:
        return (
            self.whole.are_in_place()
            and all(map(is_, _values(self.apart), self.apart_values))
            and list(map(len, self.sized)) == self.sizes
            and self.listed.are_in_place()
            and [each.tobytes() for each in self.arrays] == self.contents
        )

    def _changes(self) -> Iterator[str]:
        """The names of what has changed; what is equal has not."""
        for place, new, value in zip(self.places, _values(self.places), self.values, strict=True):
            if not _same(new, value):
                yield place.name
        for container, size in zip(self.sized, self.sizes, strict=True):
            if len(container) != size:
                yield self._name(container)
        yield from map(self._name, self.listed.changed(_same))
        for array, content in zip(self.arrays, self.contents, strict=True):
            if array.tobytes() != content:
                yield self._name(array)

    def _name(self, held: Any) -> str:
        """Whose a value is, or a container that holds it."""
        names = zip(self.places, self.values, strict=True)
        return next(
            place.name
            for place, value in names
            if value is held
            or (_is_container(value) and any(each is held for each in _members(value)))
        )


def _values(places: Iterable[Place]) -> list[Any]:
    return [each.holder.get(each.key) for each in places]


def _whole_dicts(places: Iterable[Place]) -> tuple[list[dict[Any, Any]], list[Place]]:
    """The dicts of which each entry is a place, and the places that are not in one of these."""
    keys: dict[int, set[Any]] = {}
    for each in places:
        keys.setdefault(id(each.holder), set()).add(each.key)
    whole = {
        id(each.holder): each.holder
        for each in places
        if isinstance(each.holder, dict) and each.holder.keys() == keys[id(each.holder)]
    }
    return list(whole.values()), [each for each in places if id(each.holder) not in whole]


def _is_container(value: Any) -> bool:
    return isinstance(value, CONTAINERS)


def _is_small_array(value: Any) -> bool:
    return (
        isinstance(value, np.ndarray) and value.nbytes <= _MOST_BYTES and not value.dtype.hasobject
    )


def _members(container: Any) -> tuple[Any, ...]:
    return tuple(container.values() if isinstance(container, dict) else container)


def _any_plain(members: tuple[Any, ...]) -> bool:
    return any(isinstance(each, PLAIN) for each in members)


def _memory(tensor: torch.Tensor) -> Any:
    """What the plain `tensor` and its views of the same elements share."""
    address = tensor.untyped_storage().data_ptr()
    return address, tensor.storage_offset(), tuple(tensor.shape), tensor.stride()


def _same(now: Any, then: Any) -> bool:
    if now is then:
        return True
    return isinstance(now, PLAIN) and type(now) is type(then) and bool(now == then)
