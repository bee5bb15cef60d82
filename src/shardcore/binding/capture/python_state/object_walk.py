"""Walks over objects: notes what a guard compares of each, and finds the objects in it."""

import abc
import decimal
import logging
import sys
import threading
import weakref
from collections import OrderedDict, defaultdict
from contextvars import ContextVar
from functools import partial
from operator import attrgetter
from types import FunctionType, ModuleType
from typing import Any

import attrs
import keras
import torch

from shardcore.binding import keras_private
from shardcore.binding.capture.python_state import code_facts, objects, readers
from shardcore.binding.capture.python_state.known_modules import is_library, is_standard
from shardcore.binding.capture.python_state.objects import attributes_of, is_of, namespace_reader
from shardcore.binding.capture.python_state.observed import ObservedCalls
from shardcore.binding.capture.python_state.watched import WatchedValues
from shardcore.binding.keras_private.variables import tensor_of
from shardcore.domain.capture import NotCaptured

# The most objects that one guard compares: more take longer than the step.
_MOST_OBJECTS = 300_000
_IMMUTABLE = (tuple, frozenset)
_METHODS = (FunctionType, staticmethod, classmethod)  # of a class; `__new__` is the second
# The methods by which layers, metrics, optimizers and modules compute.
_COMPUTE = frozenset({"call", "__call__", "forward", "update_state", "result", "update_step"})
_READERS = frozenset({"__get__", "__getattribute__"})  # by a name that no code has
_BASES = attrgetter("__bases__", "__mro__")
_FACTORY: Any = vars(defaultdict)["default_factory"]


@attrs.define(eq=False)
class ObjectWalk(abc.ABC):
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
    # Whether an object looks up attributes by a name that no code has: all of them count then.
    names_are_computed: bool = attrs.field(default=False, init=False)
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

    def _visit(self, value: Any, name: str) -> None:  # noqa: C901 - a case for each kind
        kind: Any = type(value)  # a class is hashable, which mypy does not know
        if value is decimal.Decimal or is_of(value, decimal.Decimal):
            self.has_decimals = True
        if is_of(value, decimal.Context):
            self.watched.add_content(partial(repr, value), name)
        if is_of(value, torch.Tensor):
            self._add_tensor(value, name)
        elif is_of(value, FunctionType):
            self._add_function(value, name)
        elif is_of(value, *objects.FUNCTIONS_OF_C):
            self.called.check_function(value)
            self.names_are_computed |= value.__name__ in _READERS
            self._add_contents(value, name)
        elif issubclass(kind, type):
            self._add_class(value)
        elif is_of(value, ModuleType):
            self._add_module(value)
        elif keras_private.is_bookkeeping(value) or objects.is_immutable(kind):
            for part in objects.wrapped(value):  # the `tzinfo` of a time may be the user's
                self._add(part, name)
        elif kind.__module__.startswith("shardcore."):
            return  # its state belongs to a distribution, which a signature names
        elif is_of(value, keras.Variable):
            self._add_variable(value)
        else:
            self._check_comparable(kind, name)
            self._add_contents(value, name)
            self._add_object(value, name)

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

    def _add_tensor(self, tensor: torch.Tensor, name: str) -> None:
        """Adds the metadata of a tensor, and what a user has set on it."""
        self.watched.add_tensor(tensor, name)
        if type(tensor) in (torch.Tensor, torch.nn.Parameter):  # ours have attributes of ours
            self._add_attributes(vars(tensor), name, is_library=False)
        if type(tensor) is torch.Tensor:  # a parameter keeps its shape, and a step its gradient
            readers.geometry(tensor, name, self.watched)
            if "grad" in self.user_names and tensor.is_leaf:
                self.watched.add_result(partial(getattr, tensor, "grad"), f"the gradient of {name}")
                self._add(tensor.grad, f"the gradient of {name}")

    def _add_variable(self, variable: keras.Variable) -> None:
        attributes, title = vars(variable), f"variable {variable.path!r}"
        keys = keras_private.state_of(variable)
        self.watched.add_attributes(attributes, keys, title)
        self.watched.add_size(attributes, f"attributes of {title}")
        tensor = tensor_of(variable)
        if not variable.trainable and id(tensor) not in self.visited:  # no autograd, no hooks
            self.visited[id(tensor)] = tensor
            self.watched.add_memory(tensor, title)
        for key in keys:
            self._add(attributes[key], title)

    def _check_comparable(self, kind: Any, name: str) -> None:
        """Checks that a change in an object of this class can be seen."""
        if issubclass(kind, torch.jit.ScriptModule):
            raise NotCaptured(
                f"it reads {name}, a module of torch.jit, whose attributes cannot be compared: use "
                "the module that it was made of"
            )
        if kind.__module__.startswith("tensorflow") or objects.has_unknown_state(kind):
            if is_library(kind.__module__) and not kind.__module__.startswith("tensorflow"):
                return
            raise NotCaptured(
                f"it reads {name}, which is {objects.kind_name(kind)}, whose content cannot be "
                "compared: pass what it gives in the batch, or keep it in a variable"
            )
        if issubclass(kind, objects.LOOKUPS):
            self.names_are_computed = True

    def _add_contents(self, value: Any, name: str) -> None:
        """Adds the members of containers and what methods, caches and references hold."""
        if is_of(value, weakref.ref):
            self.watched.add_content(partial(readers.identity, value), name)
            self.weak.append((value, name))
            return
        if is_of(value, ContextVar):
            read = partial(value.get, None)
            self.watched.add_result(read, name)
            self._add(read(), name)
            return
        copy = readers.content_of(value, name, self.budget)
        if copy is not None:
            self.watched.add_content(copy, name)
        readers.state_in_c(value, name, self.watched, shows_names=self.shows_names)
        if is_of(value, objects.CACHED):
            self._add_cache(value, name)
        if is_of(value, logging.Logger):
            title = f"the level of logger {value.name!r}"
            self.watched.add_content(partial(readers.level, value), title)
        if is_of(value, *objects.CONTAINERS):
            self._add_container(value, name)
        for part in objects.wrapped(value):
            self._add(part, name)

    def _add_container(self, container: Any, name: str) -> None:
        if container is sys.modules:
            raise NotCaptured("it reads sys.modules, which is too large to compare: import names")
        kind: Any = type(container)
        members = list(readers.members_reader(container)())
        replaceable = [member for member in members if keras_private.is_bookkeeping(member)]
        if replaceable and is_of(container, dict):  # Keras replaces these
            replaced = set(map(id, replaceable))
            keys = [key for key, value in container.items() if id(value) not in replaced]
            self.watched.add_attributes(container, tuple(keys), name)
            self.watched.add_size(container, name)
        elif objects.iterates_plainly(kind):
            self.watched.add_container(container, name)
        elif not is_of(container, *_IMMUTABLE):
            self.watched.add_identities(readers.members_reader(container), name)
        if is_of(container, defaultdict):
            factory = partial(_FACTORY.__get__, container)
            self.watched.add_result(factory, name)
            members.append(factory())
        for member in members:
            self._add(member, name)

    def _add_object(self, owner: Any, name: str) -> None:
        """Adds the attributes and slots of an object that count, and those of its classes."""
        kind: Any = type(owner)
        is_of_library = is_library(kind.__module__)
        attributes = attributes_of(owner)
        if is_of(owner, threading.local):
            attributes = threading.local.__getattribute__(owner, "__dict__")
        if attributes is not None:
            title = readers.title_of(owner, attributes, name)
            self._add_attributes(attributes, title, is_of_library)
            self.watched.add_class(owner, title)
            if not is_of_library:
                self.watched.add_namespace(namespace_reader(owner), title)
        for key, slot in objects.slots_of(kind):
            if self._is_relevant(key):
                title = f"attribute {key!r} of {name}"
                self.watched.add_result(partial(slot.__get__, owner), title)
                self._add(readers.read_or_none(slot, owner), title)
        for base in kind.__mro__:
            self._add(base, base.__name__)

    def _is_relevant(self, key: str) -> bool:
        return self.names is None or key in self.names

    def _is_named_by_users(self, key: str) -> bool:
        return self.names is None or key in self.user_names

    def _add_attributes(self, attributes: dict[str, Any], title: str, is_library: bool) -> None:
        """Adds attributes: of a class of a library those that count, of another one all."""
        keys = []
        for key, value in list(attributes.items()):
            if key in keras_private.RUNS_NOTED or keras_private.is_bookkeeping(value):
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

    def _add_class(self, kind: type) -> None:
        self.called.check_class(kind)
        space, module = vars(kind), kind.__module__
        if is_library(module) or is_standard(module):
            # Methods that programs replace, and those that the user's code reaches by `super()`.
            named = tuple((self.user_names | _COMPUTE) & space.keys())
            self.watched.add_attributes(space, named, f"class {kind.__qualname__}")
            return
        entries = [
            (key, value)
            for key, value in space.items()
            if not key.startswith("__") or is_of(value, *_METHODS) or key in self.user_names
        ]
        title = f"class {kind.__qualname__}"
        if self.shows_names:
            self.watched.add_content(partial(readers.class_name, kind), f"the name of {title}")
        self.watched.add_attributes(space, tuple(key for key, _ in entries), title)
        self.watched.add_size(space, f"attributes of {title}")
        if "__dataclass_fields__" in space:
            self.watched.add_container(space["__dataclass_fields__"], f"the fields of {title}")
        for key, value in entries:
            if self._is_relevant(key) or key.startswith("__"):
                self._add(value, f"{key!r} of {title}")
        self.watched.add_results(partial(_BASES, kind), f"the bases of {title}")
        self._add(type(kind), kind.__name__)

    @abc.abstractmethod
    def _add_function(self, function: FunctionType, name: str) -> None:
        """Adds what a function reads."""

    @abc.abstractmethod
    def _add_module(self, module: ModuleType) -> None:
        """Adds what the user's code reads of a module."""

    @abc.abstractmethod
    def _add_cache(self, cached: Any, name: str) -> None:
        """Adds the values that a cache keeps, and what its function reads."""
