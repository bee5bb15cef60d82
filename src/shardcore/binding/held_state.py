"""What a step finds in Python: who holds the tensors that it reads, and what else it looks at."""

from collections.abc import Callable, Iterable, Iterator
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
        values: Where numbers, flags, names, functions, lists and tensors are held, and what it was.
        whole: The dicts of which every entry is one of these places.
        apart: All other places, and what was there.
        sized: The lists, sets and dicts among the values.
        sizes: How long they were.
        listed: Those of them that hold plain values.
        arrays: Small arrays of NumPy, and what was in them.
        memories: Where in memory the tensors lie that are held.
        seed: The state of Keras' global generator.
    """

    values: list[tuple[Place, Any]]
    whole: HeldMembers
    apart: list[tuple[Place, Any]]
    sized: list[Any]
    sizes: list[int]
    listed: HeldMembers
    arrays: list[tuple[Any, bytes]]
    memories: frozenset[Any]
    seed: Any

    @classmethod
    def of(cls, trainer: Any, local: Callable[[Any], Any]) -> "HeldState":
        """What `trainer`, its layers, optimizer, metrics and losses hold.

        Args:
            trainer: The model.
            local: Gives the plain tensor in which a tensor keeps its part.
        """
        values = [(each, _value(each)) for each in places_of(trainer)]
        whole = _whole_dicts(place for place, _ in values)
        keyed = [(place.key, value) for place, value in values if _is_container(value)]
        sized = [value for _, value in keyed]
        # What a user's list or dict holds is what a step may leave there; Keras' own hold losses.
        listed = HeldMembers.of(
            each
            for key, each in keyed
            if _any_plain(_members(each)) or not str(key).startswith("_")
        )
        held = [*(value for _, value in values), *listed.members]
        with torch.no_grad():
            parts = (local(each) for each in held if isinstance(each, torch.Tensor))
            memories = {_memory(each) for each in parts if each.layout is torch.strided}
        arrays = list({id(each): each for each in held if _is_small_array(each)}.values())
        return cls(
            values=values,
            whole=HeldMembers.of(whole.values()),
            apart=[each for each in values if id(each[0].holder) not in whole],
            sized=sized,
            sizes=list(map(len, sized)),
            listed=listed,
            arrays=[(each, each.tobytes()) for each in arrays],
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
        # Lists, and no generators: those call Python for each element, in every step.
        return (
            self.whole.are_in_place()
            and False not in [place.holder.get(place.key) is value for place, value in self.apart]
            and list(map(len, self.sized)) == self.sizes
            and self.listed.are_in_place()
            and False not in [array.tobytes() == content for array, content in self.arrays]
        )

    def _changes(self) -> Iterator[str]:
        """The names of what has changed; what is equal has not."""
        for place, value in self.values:
            if not _same(_value(place), value):
                yield place.name
        for container, size in zip(self.sized, self.sizes, strict=True):
            if len(container) != size:
                yield self._name(container)
        yield from map(self._name, self.listed.changed(_same))
        for array, content in self.arrays:
            if array.tobytes() != content:
                yield self._name(array)

    def _name(self, held: Any) -> str:
        """Whose a value is, or a container that holds it."""
        return next(
            place.name
            for place, value in self.values
            if value is held
            or (_is_container(value) and any(each is held for each in _members(value)))
        )


def _value(place: Place) -> Any:
    return place.holder.get(place.key)


def _whole_dicts(places: Iterable[Place]) -> dict[int, dict[Any, Any]]:
    """The dicts of which each entry is a place, by their `id`."""
    keys: dict[int, set[Any]] = {}
    holders = {}
    for each in places:
        keys.setdefault(id(each.holder), set()).add(each.key)
        holders[id(each.holder)] = each.holder
    return {
        number: each
        for number, each in holders.items()
        if isinstance(each, dict) and each.keys() == keys[number]
    }


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
