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


@attrs.frozen(eq=False)
class _Group:
    """Values that one call reads, and what they were.

    Args:
        read: Reads them.
        values: What they were.
        title: Names them, or what has them as `keys`.
        keys: The keys of values of a dict.
    """

    read: Callable[[], Iterable[Any]]
    values: tuple[Any, ...]
    title: str
    keys: tuple[Any, ...] = ()

    def is_unchanged(self) -> bool:
        return all(map(is_, self.read(), self.values))

    def changed_names(self) -> Iterable[str]:
        """Yields the names of the values that are not equal to what they were."""
        try:
            values = tuple(self.read())
        except KeyError:
            values = ()
        for position, then in enumerate(self.values):
            if position >= len(values) or not _is_equal(values[position], then):
                yield _shown(self.title, self.keys[position]) if self.keys else self.title


@attrs.define(eq=False)
class WatchedValues:
    """Values that the code of a step may read, in lists that calls of C alone compare.

    A guard of an object is the length of its `__dict__`, the identity of the values of its keys,
    and its class: with the same length and all keys there, no other key is there. A dict that has
    the version of then has these values: to look them up takes half the time of a guard.

    Args:
        metadata_of: Reads what changes of a tensor without an operator.
        dict_version: Numbers the states of a dict.
    """

    metadata_of: Callable[[Any], tuple[Any, ...]]
    dict_version: Callable[[dict[Any, Any]], int]

    # Dicts, their versions, and the values of each.
    _dicts: list[dict[Any, Any]] = attrs.field(factory=list, init=False)
    _versions: list[int] = attrs.field(factory=list, init=False)
    _dict_values: list[_Group] = attrs.field(factory=list, init=False)
    # Other values, and their addresses, once all are added.
    _groups: list[_Group] = attrs.field(factory=list, init=False)
    _addresses: bytes = attrs.field(default=b"", init=False)
    _alive: list[tuple[Any, ...]] = attrs.field(factory=list, init=False)
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
        several = keys * 2 if len(keys) == 1 else keys  # for one, `itemgetter` gives no tuple
        values = tuple(holder[key] for key in several)
        self._add_group(
            _Group(partial(itemgetter(*several), holder), values, title, several), holder
        )

    def add_results(
        self, read: Callable[[], Iterable[Any]], name: str, keys: tuple[str, ...] = ()
    ) -> None:
        """Adds the values that a function reads at once; `keys` name them."""
        self._add_group(_Group(read, tuple(read()), name, keys))

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
        is_dict = issubclass(type(container), dict)
        read = partial(_keys_and_values, container) if is_dict else container.__iter__
        self._add_group(_Group(read, tuple(read()), name), container)

    def _add_group(self, group: _Group, holder: object = None) -> None:
        if type(holder) is dict:  # another class may keep its values elsewhere
            self._dicts.append(holder)
            self._versions.append(self.dict_version(holder))
            self._dict_values.append(group)
        else:
            self._groups.append(group)

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
        self._addresses = _addresses_of(group.values for group in self._groups)

    def is_unchanged(self) -> bool:
        """Compares all of it, once it is sealed.

        It runs before every step, over thousands of values: lists, and no generators, which call
        Python for each element. Values are compared by their addresses, not by `==`, which runs
        `__eq__` of the user, and takes 1 for True.
        """
        try:
            return (
                not any(self._empties)
                and list(map(len, self._sized)) == self._sizes
                and list(map(type, self._owners)) == self._kinds
                and all(map(is_, [read() for read in self._namespace_readers], self._namespaces))
                and self._are_dicts_unchanged()
                and _addresses_of([group.read() for group in self._groups]) == self._addresses
                and list(map(self.metadata_of, self._leaves)) == self._leaf_states
                and False not in [copy() == then for _, copy, then in self._contents]
            )
        # A key was deleted; a container changes meanwhile; the bases of a class were replaced.
        except (KeyError, RuntimeError, TypeError, ValueError):
            return False

    def _are_dicts_unchanged(self) -> bool:
        versions = list(map(self.dict_version, self._dicts))
        if versions == self._versions:
            return True
        pairs = zip(versions, self._versions, strict=True)
        changed = [position for position, (now, then) in enumerate(pairs) if now != then]
        if not all(self._dict_values[position].is_unchanged() for position in changed):
            return False
        self._versions = versions  # other keys have changed, or values were set and set back
        return True

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
        for group in chain(self._dict_values, self._groups):
            yield from group.changed_names()
        dicts = zip(self._namespace_names, self._namespace_readers, self._namespaces, strict=True)
        yield from (f"the `__dict__` of {name}" for name, read, then in dicts if read() is not then)
        tensors = zip(self._leaf_names, self._leaves, self._leaf_states, strict=True)
        yield from (
            f"requires_grad or a hook of {name}"
            for name, tensor, state in tensors
            if self.metadata_of(tensor) != state
        )
        yield from (name for name, copy, then in self._contents if copy() != then)


def _addresses_of(groups: Iterable[Iterable[Any]]) -> bytes:
    """Reads the addresses of objects: what an array of objects holds are pointers."""
    return np.fromiter(chain.from_iterable(groups), object).tobytes()


def _keys_and_values(entries: dict[Any, Any]) -> Iterable[Any]:
    return chain(entries.keys(), entries.values())


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
