"""Walks over objects: notes what a guard compares of each, and finds the objects in it."""

import abc
import decimal
import logging
import sys
import threading
import weakref
from collections import defaultdict
from contextvars import ContextVar
from functools import partial
from types import FunctionType, ModuleType
from typing import Any

import attrs
import keras
import torch

from shardcore.binding import keras_private
from shardcore.binding.capture.python_state import objects, readers
from shardcore.binding.capture.python_state.attribute_walk import AttributeWalk
from shardcore.binding.capture.python_state.known_modules import STREAMS, is_library
from shardcore.binding.capture.python_state.objects import attributes_of, is_of, namespace_reader
from shardcore.binding.keras_private.variables import tensor_of
from shardcore.domain.capture import NotCaptured

_IMMUTABLE = (tuple, frozenset)
_READERS = frozenset({"__get__", "__getattribute__"})  # by a name that no code has
_FACTORY: Any = vars(defaultdict)["default_factory"]


@attrs.define(eq=False)
class ObjectWalk(AttributeWalk):
    """A walk over objects: tensors, variables, containers and others."""

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
        elif objects.is_library_function(value) or kind.__module__ in STREAMS:
            return
        elif readers.is_output(value):
            state = partial(readers.state_of_output, value)
            self.watched.add_content(state, f"the state of {name}")
            self._add_attributes(vars(value), name, is_library=False)
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

    def _add_tensor(self, tensor: torch.Tensor, name: str) -> None:
        """Adds the metadata of a tensor, and what a user has set on it."""
        kind: Any = type(tensor)
        if objects.overrides_torch_function(kind):
            raise NotCaptured(
                f"it reads {name}, a tensor whose class {kind.__qualname__} has a "
                "__torch_function__, which a guard would call: use a plain tensor"
            )
        self.watched.add_tensor(tensor, name)
        if is_library(kind.__module__) and kind not in (torch.Tensor, torch.nn.Parameter):
            return  # ours have attributes of ours
        self._add_attributes(vars(tensor), name, is_library=False)
        if kind is torch.Tensor:  # a parameter keeps its shape
            readers.geometry(tensor, name, self.watched)
        elif kind is not torch.nn.Parameter:
            self.watched.add_class(tensor, name)
            self._add_classes(kind)
        if "grad" in self.user_names and tensor.is_leaf and id(tensor) not in self.of_variables:
            self._add_gradient(tensor, f"the gradient of {name}")

    def _add_gradient(self, tensor: torch.Tensor, name: str) -> None:
        """Adds the gradient of a tensor; each step may give a parameter another one."""
        if type(tensor) is torch.Tensor or tensor.grad is None:
            self.watched.add_result(partial(getattr, tensor, "grad"), name)
        self._add(tensor.grad, name)

    def _add_variable(self, variable: keras.Variable) -> None:
        attributes, title = vars(variable), f"variable {variable.path!r}"
        keys = keras_private.state_of(variable)
        self.watched.add_attributes(attributes, keys, title)
        self.watched.add_size(attributes, f"attributes of {title}")
        self._add_classes(type(variable))
        tensor = tensor_of(variable)
        self.of_variables.add(id(tensor))
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
        if is_of(value, *objects.PROXIES):
            self.proxies.append((value, name))
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
        pairs = list(dict.items(container)) if is_of(container, dict) else []
        replaced = {id(value) for key, value in pairs if keras_private.is_bookkeeping(value, key)}
        if replaced:  # by Keras
            members = [member for member in members if id(member) not in replaced]
            keys = tuple(key for key, value in pairs if id(value) not in replaced)
            self.watched.add_attributes(container, keys, name)
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
            if keras_private.is_callback(owner):
                self._add_callback(attributes, title)
            else:
                self._add_attributes(attributes, title, is_of_library)
            self.watched.add_class(owner, title)
            if not is_of_library:  # it may get another `__dict__`
                self.watched.add_namespace(namespace_reader(owner), title)
        for key, slot in objects.slots_of(kind):
            if self._is_relevant(key):
                title = f"attribute {key!r} of {name}"
                self.watched.add_result(partial(slot.__get__, owner), title)
                self._add(readers.read_or_none(slot, owner), title)
        self._add_classes(kind)

    def _add_classes(self, kind: Any) -> None:
        for base in kind.__mro__:
            self._add(base, base.__name__)

    @abc.abstractmethod
    def _add_function(self, function: FunctionType, name: str) -> None:
        """Adds what a function reads."""

    @abc.abstractmethod
    def _add_module(self, module: ModuleType) -> None:
        """Adds what the user's code reads of a module."""

    @abc.abstractmethod
    def _add_cache(self, cached: Any, name: str) -> None:
        """Adds the values that a cache keeps, and what its function reads."""
