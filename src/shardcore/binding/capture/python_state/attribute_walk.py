"""Walks over the attributes of objects and classes: those that the code of a step may read."""

import abc
from collections import OrderedDict
from functools import partial
from operator import attrgetter, getitem
from types import FunctionType
from typing import Any

import attrs

from shardcore.binding import keras_private
from shardcore.binding.capture.python_state import code_facts, objects, readers
from shardcore.binding.capture.python_state.known_modules import is_library, is_standard
from shardcore.binding.capture.python_state.objects import is_of
from shardcore.binding.capture.python_state.observed import ObservedCalls
from shardcore.binding.capture.python_state.watched import WatchedValues
from shardcore.domain.capture import NotCaptured

# The most objects that one guard compares: more take longer than the step.
_MOST_OBJECTS = 300_000
_METHODS = (FunctionType, staticmethod, classmethod)  # of a class; `__new__` is the second
# The methods by which layers, metrics, optimizers and modules compute.
_COMPUTE = frozenset(
    {
        *("call", "__call__", "forward", "compute_mask", "update_state", "result"),
        *("compute_loss", "compute_metrics", "train_step", "test_step", "predict_step"),
        *("apply", "apply_gradients", "update_step", "assign", "assign_add", "assign_sub"),
    }
)
# What dataclasses and attrs know of the fields of a class, and the names of what returns it.
_FIELDS = frozenset({"__dataclass_fields__", "__attrs_attrs__"})
_READ_FIELDS = frozenset({"fields", "fields_dict", "asdict", "astuple", *_FIELDS})
_BASES = attrgetter("__bases__", "__mro__")


@attrs.define(eq=False)
class AttributeWalk(abc.ABC):
    """A walk over objects, each visited once.

    Args:
        called: The functions that steps call.
        names: The attributes that count; None if all do.
        watched: Gets what is compared.
    """

    called: ObservedCalls
    names: frozenset[str] | None
    watched: WatchedValues
    # By identity, all that was visited: no other object gets its identity.
    visited: dict[int, Any] = attrs.field(factory=dict, init=False)
    # What remains to be visited: values with a name for messages.
    pending: list[tuple[Any, str]] = attrs.field(factory=list, init=False)
    # Weak references: what only they refer to would live as long as the guard, were it compared.
    weak: list[tuple[Any, str]] = attrs.field(factory=list, init=False)
    proxies: list[tuple[Any, str]] = attrs.field(factory=list, init=False)
    # Whether an object looks up attributes by a name that no code has: all of them count then.
    names_are_computed: bool = attrs.field(default=False, init=False)
    of_variables: set[int] = attrs.field(factory=set, init=False)  # the ids of their tensors
    # Of classes of libraries: the namespace of the class, the name of a method, and both.
    methods: list[tuple[Any, str, str]] = attrs.field(factory=list, init=False)
    abstract: list[Any] = attrs.field(factory=list, init=False)  # classes that register others
    has_decimals: bool = attrs.field(default=False, init=False)  # whether it visited some
    budget: readers.Budget = attrs.field(factory=readers.Budget, init=False)
    # All names in the user's code, and those that it has looked up.
    user_names: frozenset[str] = attrs.field(init=False)
    passed_variables: frozenset[str] = attrs.field(init=False)
    passed_attributes: frozenset[str] = attrs.field(init=False)
    # Whether the user's code may read the names of functions and classes, also as text.
    shows_names: bool = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        self.user_names = self.called.user_names()
        of_functions = not self.user_names.isdisjoint(code_facts.OF_FUNCTIONS)
        self.shows_names = of_functions or self.called.makes_text()
        self.passed_variables, self.passed_attributes = self.called.passed_names()

    def _add(self, value: object, name: str) -> None:
        if type(value) not in objects.PLAIN_TYPES and id(value) not in self.visited:
            self.visited[id(value)] = value
            self.pending.append((value, name))

    def _visit_pending(self) -> None:
        while self.pending:
            if len(self.visited) > _MOST_OBJECTS:
                raise NotCaptured(
                    f"its Python holds more than {_MOST_OBJECTS} objects, which takes too long to "
                    "compare: keep them in arrays, or outside the layers"
                )
            self._visit(*self.pending.pop())

    def _is_relevant(self, key: str) -> bool:
        return self.names is None or key in self.names

    def _is_named_by_users(self, key: str) -> bool:
        return self.names is None or key in self.user_names

    def _add_attributes(self, attributes: dict[str, Any], title: str, is_library: bool) -> None:
        """Adds attributes: of a class of a library those that count, of another one all."""
        keys = []
        for key, value in list(attributes.items()):
            is_noted = key in keras_private.RUNS_NOTED and key not in self.user_names
            if is_noted or keras_private.is_bookkeeping(value, key):
                continue
            is_fixed = is_library and key in keras_private.FIXED and key not in self.user_names
            counts = self._is_relevant(key) and not is_fixed
            if counts or not is_library:
                keys.append(key)
            if not counts:
                continue
            if key in keras_private.REFILLED:
                self.watched.add_size(value, f"attribute {key!r} of {title}")
            elif is_library and type(value) is OrderedDict and not self._is_named_by_users(key):
                # Hooks of torch: the library alone reads it, its members and no attributes.
                self._add_container(value, f"attribute {key!r} of {title}")
            else:
                self._add(value, f"attribute {key!r} of {title}")
        self.watched.add_attributes(attributes, tuple(keys), title)
        if self.names is None and not is_library:  # code may iterate over them
            self.watched.add_content(partial(list, attributes), f"the order of {title}")
        if keras_private.RUNS_NOTED.isdisjoint(attributes):
            noun = "new attributes" if is_library else "attributes"
            self.watched.add_size(attributes, f"{noun} of {title}", is_new_attribute=is_library)
        else:
            count = partial(readers.count_attributes, attributes)
            self.watched.add_content(count, f"size of {title}")

    def _add_callback(self, attributes: dict[str, Any], title: str) -> None:
        """Adds the attributes that the user's code names: others may change with each step."""
        keys = tuple(key for key in attributes if self._is_named_by_users(key))
        self.watched.add_attributes(attributes, keys, title)
        absent = self.user_names.difference(keys)
        self.watched.add_absent_keys(attributes, absent, f"attributes of {title}")
        for key in keys:
            self._add(attributes[key], f"attribute {key!r} of {title}")

    def _add_class(self, kind: type) -> None:
        self.called.check_class(kind)
        if is_of(kind, abc.ABCMeta):
            self.abstract.append(kind)
        space, module = vars(kind), kind.__module__
        if is_library(module) or is_standard(module):
            # Methods that programs replace, and those that the user's code reaches by `super()`.
            named = (self.user_names | _COMPUTE) & space.keys()
            self.methods.extend((space, key, f"{kind.__qualname__}.{key}") for key in named)
            title = f"new attributes of class {kind.__qualname__}"
            self.watched.add_size(space, title, is_new_attribute=True)
            return
        named = self.user_names | _FIELDS
        entries = [
            (key, value)
            for key, value in space.items()
            if not key.startswith("__") or is_of(value, *_METHODS) or key in named
        ]
        title = f"class {kind.__qualname__}"
        if self.shows_names:
            self.watched.add_content(partial(readers.class_name, kind), f"the name of {title}")
        self.watched.add_attributes(space, tuple(key for key, _ in entries), title)
        self.watched.add_size(space, f"attributes of {title}")
        if "__dataclass_fields__" in space:
            self.watched.add_container(space["__dataclass_fields__"], f"the fields of {title}")
        if not self.user_names.isdisjoint(_READ_FIELDS):
            for key in _FIELDS & space.keys():
                self._add(space[key], f"the fields of {title}")
        self.watched.add_class(kind, title)
        for key, value in entries:
            if self._is_relevant(key) or key.startswith("__"):
                self._add(value, f"{key!r} of {title}")
        self.watched.add_results(partial(_BASES, kind), f"the bases of {title}")
        for base in (type(kind), *kind.__mro__[1:]):
            self._add(base, base.__name__)

    def watch_methods(self) -> None:
        """Adds the methods of all classes of libraries at once: to look up each takes longer."""
        if self.methods:
            spaces, keys, titles = zip(*self.methods, strict=True)
            self.watched.add_results(partial(map, getitem, spaces, keys), "a library", titles)

    @abc.abstractmethod
    def _visit(self, value: Any, name: str) -> None:
        """Adds what an object holds."""

    @abc.abstractmethod
    def _add_container(self, container: Any, name: str) -> None:
        """Adds a container and its members."""
