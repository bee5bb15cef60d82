"""The guard of a captured step: what Python held when the step was recorded is still held."""

from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from operator import is_
from typing import Any

import attrs
import torch

from shardcore.binding import keras_private
from shardcore.binding.captured import torch_modes
from shardcore.binding.captured.attributes import CONTAINERS, guarded_attributes
from shardcore.binding.captured.closures import PLAIN, Closures
from shardcore.binding.captured.contents import (
    GuardedAttribute,
    content_of,
    members,
    reader_of,
    why_not_comparable,
)
from shardcore.binding.captured.functions import CalledFunctions
from shardcore.domain.steps.capture import NotCaptured


@attrs.frozen
class PythonGuard:
    """The values that the objects of a model held when a step was recorded.

    Args:
        attributes: Where numbers, flags, names, functions, lists and tensors are held.
        values: What was held there.
        readers: They read the same values, holder by holder.
        containers: The lists, sets and dicts among the values, in the same order.
        sizes: Their lengths then.
        members: Views of those of which each member is compared, with their members then.
        buffers: Of arrays and the like, a name, what copies their content, and the content then.
        memories: Where in memory the tensors are that are held.
        seed: The state of Keras' global generator.
    """

    attributes: list[GuardedAttribute]
    values: list[Any]
    readers: list[Callable[[], Iterable[Any]]]
    containers: list[Any]
    sizes: list[int]
    members: list[tuple[str, Any, tuple[Any, ...]]]
    buffers: list[tuple[str, Callable[[], Any], Any]]
    memories: frozenset[Any]
    seed: Any

    @classmethod
    def of(
        cls,
        trainer: Any,
        called: CalledFunctions,
        local: Callable[[Any], Any],
        closures: Closures | None = None,
    ) -> "PythonGuard":
        """Returns the guard for what `trainer`, its layers, optimizer, metrics and losses hold.

        Args:
            trainer: The model.
            called: The functions that its steps call.
            local: Returns this rank's plain tensor of a tensor.
            closures: Those of the step, if each call makes another function.

        Raises:
            NotCaptured: If the step reads what cannot be compared.
        """
        attributes = guarded_attributes(trainer, called, closures)
        groups: dict[int, list[GuardedAttribute]] = {}
        for each in attributes:
            groups.setdefault(id(each.holder), []).append(each)
        attributes = list(chain.from_iterable(groups.values()))
        held = [(each, each.value) for each in attributes]
        _check_comparable(held, called.names())
        containers = [pair for pair in held if isinstance(pair[1], CONTAINERS)]
        contents = [
            (each.name, members(value), tuple(members(value)))
            for each, value in containers
            if not _is_refilled(each.key, value)
        ]
        named = [(name, member) for name, _, found in contents for member in found]
        named += [(each.name, value) for each, value in held]
        named = [pair for pair in named if not isinstance(pair[1], PLAIN)]
        changeable = {id(value): (name, content_of(value)) for name, value in named}
        return cls(
            attributes=attributes,
            values=[value for _, value in held],
            readers=[reader_of(g[0].holder, [each.key for each in g]) for g in groups.values()],
            containers=[value for _, value in containers],
            sizes=[len(value) for _, value in containers],
            members=contents,
            buffers=[(name, copy, copy()) for name, copy in changeable.values() if copy],
            memories=_memories((value for _, value in named), local),
            seed=keras_private.global_seed(),
        )

    def check_holds(self, tensors: Iterable[object]) -> None:
        """Checks that an attribute or a container holds `tensors`, which a program reads.

        A change of any other would not be seen.

        Raises:
            NotCaptured: If one is held by none.
        """
        for tensor in tensors:
            if not isinstance(tensor, torch.Tensor) or _memory(tensor) in self.memories:
                continue
            if torch_modes.keeps_casts():
                raise NotCaptured(
                    "autocast keeps what it has cast of a weight, which steps in the same scope "
                    "read: use torch.autocast(..., cache_enabled=False)"
                )
            raise NotCaptured(
                f"it reads a tensor of shape {tuple(tensor.shape)} that no variable, torch module "
                "or attribute of a layer holds: make it an attribute of the layer"
            )

    def change(self) -> str:
        """Returns the name of the first attribute that has changed; empty if none has.

        It runs before every step, over thousands of attributes: identity is compared first.
        """
        if keras_private.global_seed() is not self.seed:
            return "Keras' global seed generator"
        return "" if self._is_identical() else next(self._changes(), "")

    def _is_identical(self) -> bool:
        # Lists, and no generators: those call Python for each element, in every step.
        try:
            values = chain.from_iterable([read() for read in self.readers])
        except KeyError:
            return False
        now = chain.from_iterable([view for _, view, _ in self.members])
        then = chain.from_iterable([found for _, _, found in self.members])
        return (
            all(map(is_, values, self.values))
            and list(map(len, self.containers)) == self.sizes
            and all(map(is_, now, then))
            and False not in [copy() == content for _, copy, content in self.buffers]
        )

    def _changes(self) -> Iterator[str]:
        """Yields the names of changed values; a new value that equals the old one is no change."""
        sizes = iter(self.sizes)
        for attribute, value in zip(self.attributes, self.values, strict=True):
            is_resized = isinstance(value, CONTAINERS) and len(value) != next(sizes)
            if is_resized or not _is_same(attribute.value, value):
                yield attribute.name
        for name, view, found in self.members:
            if not all(map(_is_same, view, found)):
                yield name
        yield from (name for name, copy, content in self.buffers if copy() != content)


def _check_comparable(held: list[tuple[GuardedAttribute, object]], names: set[str]) -> None:
    """Refuses a value that the step reads and whose changes cannot be seen."""
    for attribute, value in held:
        if attribute.key not in names or isinstance(value, PLAIN):
            continue
        if why := why_not_comparable(value):
            raise NotCaptured(f"it reads {attribute.name}, which {why}")


def _is_refilled(key: object, container: object) -> bool:
    """Whether it is private, of losses for instance, which Keras fills and empties in each step."""
    is_plain = any(isinstance(member, PLAIN) for member in members(container))
    return str(key).startswith("_") and not is_plain


def _memories(held: Iterable[Any], local: Callable[[Any], Any]) -> frozenset[Any]:
    with torch.no_grad():
        tensors = [local(each) for each in held if isinstance(each, torch.Tensor)]
        return frozenset(_memory(each) for each in tensors if each.layout is torch.strided)


def _memory(tensor: torch.Tensor) -> Any:
    """Returns what the plain `tensor` and its views of the same elements have in common."""
    address = tensor.untyped_storage().data_ptr()
    return address, tensor.storage_offset(), tuple(tensor.shape), tensor.stride()


def _is_same(now: object, then: object) -> bool:
    if now is then:
        return True
    return isinstance(now, PLAIN) and type(now) is type(then) and bool(now == then)
