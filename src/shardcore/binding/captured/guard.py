"""The guard of a captured step: what Python held when the step was recorded is still held."""

from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from operator import is_
from typing import Any

import attrs
import torch

from shardcore.binding import seams
from shardcore.binding.captured.attributes import (
    CONTAINERS,
    PLAIN,
    guarded_attributes,
    members,
)
from shardcore.binding.captured.contents import content_of, why_not_comparable
from shardcore.binding.captured.functions import CalledFunctions
from shardcore.binding.captured.lookups import GuardedAttribute
from shardcore.domain.capture import NotCaptured


@attrs.frozen
class PythonGuard:
    """The values that the objects of a model held when a step was recorded.

    Args:
        attributes: Where numbers, flags, names, functions, lists and tensors are held.
        values: What was held there.
        containers: The lists, sets and dicts among the values.
        sizes: Their lengths.
        contents: The containers of which each member is compared.
        live: Their members, as they are now.
        members: Their members, as they were.
        buffers: Arrays and the like, what copies their content, and the content.
        memories: Where in memory the tensors are that are held.
        seed: The state of Keras' global generator.
    """

    attributes: list[GuardedAttribute]
    values: list[Any]
    containers: list[Any]
    sizes: list[int]
    contents: list[Any]
    live: list[Any]
    members: list[tuple[Any, ...]]
    buffers: list[tuple[Any, Callable[[], Any], Any]]
    memories: frozenset[Any]
    seed: Any

    @classmethod
    def of(
        cls, trainer: Any, called: CalledFunctions, local: Callable[[Any], Any]
    ) -> "PythonGuard":
        """Returns the guard for what `trainer`, its layers, optimizer, metrics and losses hold.

        Args:
            trainer: The model.
            called: The functions that its steps call.
            local: Returns this rank's plain tensor of a tensor.

        Raises:
            NotCaptured: If the step reads what cannot be compared.
        """
        attributes = guarded_attributes(trainer, called)
        values = [each.value for each in attributes]
        names = called.names()
        for attribute, value in zip(attributes, values, strict=True):
            why = "" if isinstance(value, PLAIN) else why_not_comparable(value)
            if why and attribute.key in names:
                raise NotCaptured(f"it reads {attribute.name}, which {why}")
        pairs = zip(attributes, values, strict=True)
        keyed = [(each.key, value) for each, value in pairs if isinstance(value, CONTAINERS)]
        containers = [value for _, value in keyed]
        # Private containers of Keras, of losses for instance, are filled and emptied in each step.
        contents = [
            each
            for key, each in keyed
            if not str(key).startswith("_")
            or any(isinstance(member, PLAIN) for member in members(each))
        ]
        found = [tuple(members(each)) for each in contents]
        held = [*values, *chain.from_iterable(found)]
        changeable = {id(each): each for each in held if not isinstance(each, PLAIN)}.values()
        buffers = [(each, copy) for each in changeable if (copy := content_of(each)) is not None]
        return cls(
            attributes=attributes,
            values=values,
            containers=containers,
            sizes=list(map(len, containers)),
            contents=contents,
            live=list(map(members, contents)),
            members=found,
            buffers=[(each, copy, copy()) for each, copy in buffers],
            memories=_memories(held, local),
            seed=seams.global_seed(),
        )

    def holds(self, tensor: torch.Tensor) -> bool:
        """Whether an attribute or a container holds `tensor`."""
        return _memory(tensor) in self.memories

    def change(self) -> str:
        """Returns the name of the first attribute that has changed; empty if none has.

        It runs before every step, over thousands of attributes: identity is compared first.
        """
        if seams.global_seed() is not self.seed:
            return "Keras' global seed generator"
        return "" if self._is_identical() else next(self._changes(), "")

    def _is_identical(self) -> bool:
        # Lists, and no generators: those call Python for each element, in every step.
        pairs = zip(self.attributes, self.values, strict=True)
        return (
            False not in [each.holder.get(each.key) is value for each, value in pairs]
            and list(map(len, self.containers)) == self.sizes
            and all(map(is_, chain.from_iterable(self.live), chain.from_iterable(self.members)))
            and False not in [copy() == content for _, copy, content in self.buffers]
        )

    def _changes(self) -> Iterator[str]:
        """Yields the names of what has changed; a value that is equal to the old one has not."""
        for attribute, value in zip(self.attributes, self.values, strict=True):
            if not _is_same(attribute.value, value):
                yield attribute.name
        for container, size in zip(self.containers, self.sizes, strict=True):
            if len(container) != size:
                yield self._name(container)
        for container, then in zip(self.contents, self.members, strict=True):
            if not all(map(_is_same, members(container), then)):
                yield self._name(container)
        for value, copy, content in self.buffers:
            if copy() != content:
                yield self._name(value)

    def _name(self, held: Any) -> str:
        """Returns the name of the attribute that has the value `held`, or a container with it."""
        return next(
            attribute.name
            for attribute, value in zip(self.attributes, self.values, strict=True)
            if value is held
            or (isinstance(value, CONTAINERS) and any(each is held for each in members(value)))
        )


def _memories(held: Iterable[Any], local: Callable[[Any], Any]) -> frozenset[Any]:
    with torch.no_grad():
        tensors = [local(each) for each in held if isinstance(each, torch.Tensor)]
        return frozenset(_memory(each) for each in tensors if each.layout is torch.strided)


def _memory(tensor: torch.Tensor) -> Any:
    """Returns what the plain `tensor` and its views of the same elements have in common."""
    address = tensor.untyped_storage().data_ptr()
    return address, tensor.storage_offset(), tuple(tensor.shape), tensor.stride()


def _is_same(now: Any, then: Any) -> bool:
    if now is then:
        return True
    return isinstance(now, PLAIN) and type(now) is type(then) and bool(now == then)
