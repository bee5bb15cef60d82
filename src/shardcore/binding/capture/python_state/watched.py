"""The values that a guard compares: how they are read, and what they were."""

from collections.abc import Callable, Iterable
from functools import partial
from itertools import chain
from operator import is_, itemgetter
from typing import Any

import attrs
import numpy as np
import torch

from shardcore.binding.capture.python_state.objects import PLAIN_TYPES

_ABSENT = object()


@attrs.frozen
class Change:
    """A change of Python state since a recording."""

    name: str  # what has changed
    is_new_attribute: bool = False  # whether it is the number of attributes of a library's object


@attrs.define(eq=False)
class WatchedValues:
    """Values that the code of a step may read, in lists that calls of C alone compare.

    A guard of an object is the length of its `__dict__`, the identity of the values of its keys,
    and its class: with the same length and all keys there, no other key is there.

    Args:
        metadata_of: Reads what changes of a tensor without an operator.
    """

    metadata_of: Callable[[Any], tuple[Any, ...]]

    # By values: what reads several of them, the values, and their names.
    _readers: list[Callable[[], Iterable[Any]]] = attrs.field(factory=list, init=False)
    _values: list[Any] = attrs.field(factory=list, init=False)
    _names: list[tuple[str, str]] = attrs.field(factory=list, init=False)
    _addresses: bytes = attrs.field(default=b"", init=False)  # of the values, once all are added
    # Containers whose members are compared: their iterators, and the members, one after another.
    _iterators: list[Callable[[], Iterable[Any]]] = attrs.field(factory=list, init=False)
    _alive: list[tuple[Any, ...]] = attrs.field(factory=list, init=False)
    _flat: list[Any] = attrs.field(factory=list, init=False)
    _member_addresses: bytes = attrs.field(default=b"", init=False)
    _member_names: list[str] = attrs.field(factory=list, init=False)
    # Containers whose length is compared.
    _empty: list[tuple[Change, Any]] = attrs.field(factory=list, init=False)
    _empties: list[Any] = attrs.field(factory=list, init=False)
    _sized: list[Any] = attrs.field(factory=list, init=False)
    _sizes: list[int] = attrs.field(factory=list, init=False)
    _size_changes: list[Change] = attrs.field(factory=list, init=False)
    # Objects whose class is compared.
    _owners: list[Any] = attrs.field(factory=list, init=False)
    _kinds: list[type] = attrs.field(factory=list, init=False)
    _owner_names: list[str] = attrs.field(factory=list, init=False)
    # What reads the `__dict__` of an object, the dict, and the name of the object.
    _namespace_readers: list[Callable[[], Any]] = attrs.field(factory=list, init=False)
    _namespaces: list[Any] = attrs.field(factory=list, init=False)
    _namespace_names: list[str] = attrs.field(factory=list, init=False)
    # Copies of contents.
    _contents: list[tuple[str, Callable[[], Any], Any]] = attrs.field(factory=list, init=False)
    # Tensors that are watched, and those among them whose metadata is compared.
    tensors: list[Any] = attrs.field(factory=list, init=False)
    _leaves: list[Any] = attrs.field(factory=list, init=False)
    _leaf_states: list[Any] = attrs.field(factory=list, init=False)
    _leaf_names: list[str] = attrs.field(factory=list, init=False)

    def add_attributes(self, holder: Any, keys: tuple[Any, ...], title: str) -> None:
        """Adds entries of a dict, or of the namespace of a class."""
        if not keys:
            return
        if len(keys) == 1:
            keys *= 2  # `itemgetter` gives a tuple only for several
        self._readers.append(partial(itemgetter(*keys), holder))
        self._values += [holder[key] for key in keys]
        self._names += [(title, key) for key in keys]

    def add_results(self, read: Callable[[], tuple[Any, ...]], name: str) -> None:
        """Adds the values that a function reads at once."""
        values = read()
        self._readers.append(read)
        self._values += values
        self._names += [(name, "")] * len(values)

    def add_result(self, read: Callable[[], Any], name: str) -> None:
        """Adds the value that a function reads; it may raise ValueError or AttributeError."""
        self.add_results(partial(_or_absent, read), name)

    def add_absent_keys(self, holder: dict[str, Any], keys: frozenset[str], name: str) -> None:
        """Adds keys that a dict does not have."""
        self.add_content(partial(holder.keys().isdisjoint, keys), name)

    def add_container(self, container: Any, name: str) -> None:
        """Adds a container of a class of Python's own, with its members."""
        self.add_size(container, name)
        if not container:
            return
        views: list[Any] = [container]
        if issubclass(type(container), dict):
            views = [container.keys(), container.values()]
        for view in views:
            self._iterators.append(view.__iter__)
            self._flat += view
            self._member_names.append(name)

    def add_identities(self, read: Callable[[], Iterable[Any]], name: str) -> None:
        """Adds the members of a container of another class, which `read` iterates over."""
        self._alive.append(tuple(read()))  # so that no other object gets the identity of a member
        self.add_content(lambda: list(map(id, read())), name)

    def add_size(self, container: Any, name: str, *, is_new_attribute: bool = False) -> None:
        """Adds the length of a container, whose change is a `Change` with these arguments."""
        change = Change(name, is_new_attribute)
        if container:
            self._sized.append(container)
            self._sizes.append(len(container))
            self._size_changes.append(change)
        else:
            self._empty.append((change, container))
            self._empties.append(container)

    def add_class(self, owner: object, name: str) -> None:
        """Adds the class of an object."""
        self._owners.append(owner)
        self._kinds.append(type(owner))
        self._owner_names.append(name)

    def add_namespace(self, read: Callable[[], dict[str, Any]], name: str) -> None:
        """Adds the `__dict__` of an object, which may be replaced by another dict."""
        self._namespace_readers.append(read)
        self._namespaces.append(read())
        self._namespace_names.append(name)

    def add_content(self, copy: Callable[[], Any], name: str) -> None:
        """Adds what a function copies."""
        self._contents.append((name, copy, copy()))

    def add_tensor(self, tensor: Any, name: str) -> None:
        """Adds the memory and the metadata of a tensor; its values are read by each run."""
        self.add_memory(tensor, name)
        self._leaves.append(tensor)
        state = self.metadata_of(tensor)
        self._leaf_states.append(state)
        self._leaf_names.append(name)
        for hooks in filter(None, state[1:]):
            self.add_size(hooks, f"the hooks of {name}")

    def add_memory(self, tensor: object, name: str) -> None:
        """Adds the memory of a tensor: `x.data = value` gives a sharded one another local shard."""
        self.tensors.append(tensor)
        if "part" in vars(tensor):
            self.add_results(partial(itemgetter("part", "part"), vars(tensor)), f"{name}.data")

    def seal(self) -> None:
        """Notes the addresses of what was added; nothing is added afterwards."""
        self._addresses = _addresses_of(self._values, len(self._values))
        self._member_addresses = _addresses_of(self._flat, len(self._flat))

    def is_unchanged(self) -> bool:
        """Compares all of it, once it is sealed.

        It runs before every step, over thousands of values: lists, and no generators, which call
        Python for each element. Values are compared by their addresses, not by `==`, which runs
        `__eq__` of the user, and takes 1 for True.
        """
        try:
            values = chain.from_iterable([read() for read in self._readers])
            members = chain.from_iterable([iterate() for iterate in self._iterators])
            return (
                not any(self._empties)
                and list(map(len, self._sized)) == self._sizes
                and list(map(type, self._owners)) == self._kinds
                and all(map(is_, [read() for read in self._namespace_readers], self._namespaces))
                and _addresses_of(values, len(self._values)) == self._addresses
                and _addresses_of(members, len(self._flat)) == self._member_addresses
                and list(map(self.metadata_of, self._leaves)) == self._leaf_states
                and False not in [copy() == then for _, copy, then in self._contents]
            )
        # A key was deleted; a container changes meanwhile; the bases of a class were replaced.
        except (KeyError, RuntimeError, TypeError, ValueError):
            return False

    def changes(self) -> Iterable[Change]:
        """Yields the changes; a new number equal to the old one is none."""
        yield from (change for change, container in self._empty if container)
        sizes = zip(self._size_changes, self._sized, self._sizes, strict=True)
        yield from (change for change, container, size in sizes if len(container) != size)
        yield from map(Change, self._changed_names())

    def _changed_names(self) -> Iterable[str]:
        for name, owner, kind in zip(self._owner_names, self._owners, self._kinds, strict=True):
            if type(owner) is not kind:
                yield f"the class of {name}"
        yield from self._changed_values()
        dicts = zip(self._namespace_names, self._namespace_readers, self._namespaces, strict=True)
        yield from (f"the `__dict__` of {name}" for name, read, then in dicts if read() is not then)
        tensors = zip(self._leaf_names, self._leaves, self._leaf_states, strict=True)
        yield from (
            f"requires_grad or a hook of {name}"
            for name, tensor, state in tensors
            if self.metadata_of(tensor) != state
        )
        yield from (name for name, copy, then in self._contents if copy() != then)

    def _changed_values(self) -> Iterable[str]:
        position = 0
        for read in self._readers:
            try:
                values = tuple(read())
            except KeyError:
                yield _shown(*self._names[position])
                return
            for value in values:
                if not _is_equal(value, self._values[position]):
                    yield _shown(*self._names[position])
                position += 1
        position = 0
        for name, iterate in zip(self._member_names, self._iterators, strict=True):
            for member in iterate():
                if position == len(self._flat) or not _is_equal(member, self._flat[position]):
                    yield name
                    return
                position += 1


def _addresses_of(objects: Iterable[Any], count: int) -> bytes:
    """Reads the addresses of `count` objects: what an array of objects holds are pointers."""
    return np.fromiter(objects, object, count).tobytes()


def _or_absent(read: Callable[[], Any]) -> tuple[Any]:
    try:
        return (read(),)
    except (ValueError, AttributeError):
        return (_ABSENT,)


def _shown(title: str, key: str) -> str:
    if not key:
        return title
    if title.startswith("module "):
        return f"global variable {key!r} of {title.removeprefix('module ')}"
    return f"attribute {key!r} of {title}"


def _is_equal(now: object, then: object) -> bool:
    if now is then:
        return True
    if type(now) not in PLAIN_TYPES or type(now) is not type(then) or now != then:
        return False
    return not isinstance(now, float | complex) or repr(now) == repr(then)  # 0.0 equals -0.0


def memories(tensors: Iterable[Any], local: Callable[[Any], Any]) -> frozenset[Any]:
    """Collects `memory_of` of this rank's dense parts of tensors."""
    with torch.no_grad():
        parts = [local(tensor) for tensor in tensors]
        return frozenset(memory_of(part) for part in parts if part.layout is torch.strided)


def memory_of(tensor: torch.Tensor) -> Any:
    """Identifies the elements of a plain tensor: equal for its views of all of them."""
    address = tensor.untyped_storage().data_ptr()
    return address, tensor.storage_offset(), tuple(tensor.shape), tensor.stride()
