"""Walks over all that a step may look up: attributes of layers, and the names in user functions.

Such a function reads global variables, the variables in its closure, and its defaults.
"""

import builtins
import logging
import os
import sys
import weakref
from collections import deque
from collections.abc import Iterable, Iterator
from contextvars import ContextVar
from functools import partial
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import attrs
import keras
import torch

from shardcore.binding import keras_private
from shardcore.binding.captured.closures import PLAIN, Closures
from shardcore.binding.captured.contents import (
    GuardedAttribute,
    Holder,
    Referent,
    attribute_of,
    members,
    overridable,
)
from shardcore.binding.captured.functions import CalledFunctions, Names, check_guarded, is_users
from shardcore.binding.context.rank_consistency import variables_of
from shardcore.domain.steps.capture import NotCaptured

_PLAIN_TYPES = frozenset(PLAIN)
CONTAINERS = (list, dict, set, deque)
# The most objects of libraries between a layer, or a variable that a user function reads, and a
# guarded attribute.
_DEPTH = 4
_NOT_ENTERED = (ModuleType, MethodType, property, torch.Tensor, logging.Logger, logging.Handler)
# Torch modules that are Keras layers, or hold the parameters of one.
_OF_KERAS = (keras.layers.Layer, torch.nn.ParameterDict, torch.nn.ParameterList)


def guarded_attributes(
    trainer: Any, called: CalledFunctions, closures: Closures | None = None
) -> list[GuardedAttribute]:
    """Returns all that the steps of `trainer`, which call the functions `called`, may look up.

    Of `closures`, these are the attributes of the objects in them; their key is compared elsewhere.

    Raises:
        NotCaptured: If the closure of a function cannot be found, one calls a clock or the like, or
            objects are nested too deeply.
    """
    walk, given = _Walk(called), closures or Closures.of()
    try:
        walk.model(trainer)
        walk.held_by(given.objects)
        walk.functions(given.codes)
    except RecursionError:
        raise NotCaptured("what its Python holds is nested too deeply to be compared") from None
    return walk.found


@attrs.define(eq=False)
class _Walk:
    """A walk from a model, and from the functions that its steps call, to all that they hold."""

    called: CalledFunctions
    found: list[GuardedAttribute] = attrs.field(factory=list, init=False)
    visited: set[int] = attrs.field(factory=set, init=False)  # identities of all that was met
    # Variables of modules that were met, and modules with the function that names them.
    named: set[tuple[int, str]] = attrs.field(factory=set, init=False)

    def _guard(self, holder: Holder, key: str, name: str) -> None:
        self.found.append(GuardedAttribute(holder, key, name))

    def model(self, trainer: Any) -> None:
        """Finds the attributes of the layers, optimizer, metrics and losses of a model."""
        seed = keras_private.global_seed()
        for variable in [*variables_of(trainer), *([] if seed is None else [seed])]:
            self._variable(variable)
        for name, read in keras_private.uncleared_gradients(trainer):
            self._guard(Referent(read), "grad", name)
        modules = keras_private.modules_of(trainer)
        for name, module in modules:
            for holder in _tensor_dicts(module):
                for key in holder:
                    self._guard(holder, key, f"{key!r} of torch module {name!r}")
        for called, holder, tensors in keras_private.graph_tensors(trainer):
            name = f"an argument of {called!r} in a functional graph"
            self._guard(holder, "args", name)
            self._guard(holder, "kwargs", name)
            for each in tensors:
                self._guard({"": each}, "", name)
        torch_modules = [each for _, each in modules if not isinstance(each, _OF_KERAS)]
        roots = [*keras_private.parts_of(trainer), *torch_modules]
        self.visited.update(map(id, roots))
        for root in roots:  # each by itself, however deep the others hold it
            self.visited.discard(id(root))
            self._object(root, 0)

    def held_by(self, objects: Iterable[Any]) -> None:
        """Finds the attributes of objects that may not be the model's."""
        for each in filter(_is_entered, objects):
            self._object(each, 0)

    def functions(self, compared: Iterable[CodeType]) -> None:
        """Finds the names that called functions read and the model does not hold.

        The closures of functions that are `compared`, or were made in the step, are not read here.
        """
        codes = self.called.users()
        known = {id(each) for code, _ in codes for each in code.co_consts} | set(map(id, compared))
        for code, namespace in codes:
            if id(code) in self.visited:
                continue
            self._globals(code, namespace)
            if code.co_freevars and id(code) not in known:
                raise NotCaptured(
                    f"it calls {code.co_qualname} of {namespace['__name__']}, with a closure "
                    "that nothing of the model holds: make it an attribute of the layer"
                )
        if self.called.has_called(os.getenv.__code__):
            self._guard({"environ": os.environ}, "environ", "os.environ")

    def _globals(self, code: CodeType, namespace: dict[str, Any]) -> None:
        """Finds the variables that a function reads from its module, and from modules it names."""
        names, own = Names.of(code), str(namespace.get("__name__"))
        for name in names.variables:
            if name in namespace:
                self._global(namespace, name, own, names)
            else:
                check_guarded(getattr(builtins, name, None), names)
        for name in names.modules:
            module = sys.modules.get(name) or sys.modules.get(f"{own.rpartition('.')[0]}.{name}")
            if isinstance(module, ModuleType):
                self._module(module, names)

    def _global(self, namespace: dict[str, Any], name: str, module: str, names: Names) -> None:
        value, title = namespace[name], f"global variable {name!r} of {module}"
        check_guarded(value, names)
        if isinstance(value, type) and not is_users(value.__module__):
            for each in names.attributes & set(dir(value)):
                check_guarded(getattr(value, each, None), names)
        if (id(namespace), name) not in self.named:
            self.named.add((id(namespace), name))
            self._guard(namespace, name, title)
            self._within(value, title, name, True, 0)
        if isinstance(value, ModuleType):
            self._module(value, names)

    def _module(self, module: ModuleType, names: Names) -> None:
        """Finds the variables of `module` that code names, except the functions of a library."""
        if (id(module), names.place) in self.named:  # modules know each other
            return
        self.named.add((id(module), names.place))
        found = vars(module)
        for name in names.attributes & found.keys():
            is_data = not callable(found[name]) and not isinstance(found[name], ModuleType)
            is_class = isinstance(found[name], type)
            if is_data or is_class or is_users(module.__name__):
                self._global(found, name, module.__name__, names)
            else:
                check_guarded(found[name], names)

    def _function(self, function: FunctionType) -> None:
        """Finds the names that a function reads, its attributes, defaults and closure.

        In the closure of a library's function there may be one of the user's.
        """
        if not self.called.has_called(function.__code__) or id(function) in self.visited:
            return
        self.visited |= {id(function), id(function.__code__)}
        of = f"of function {function.__qualname__}"
        lookups: list[tuple[Holder, str, str]] = []
        closure = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
        for key, cell in closure:
            holder = attribute_of(cell, "cell_contents")
            lookups.append((holder, key, f"variable {key!r} in the closure {of}"))
        is_own = is_users(str(function.__module__))
        if is_own:
            self._globals(function.__code__, function.__globals__)
            keys = ("__defaults__", "__kwdefaults__")
            lookups += [(attribute_of(function, key), key, f"defaults {of}") for key in keys]
            lookups += [(vars(function), key, f"{key!r} {of}") for key in vars(function)]
        for holder, key, name in lookups:
            if is_own:
                self._guard(holder, key, name)
            self._within(holder.get(key, None), name, key, is_own, 0)

    def _class(self, kind: type) -> None:
        """Finds the attributes of a user class."""
        if id(kind) in self.visited or not is_users(kind.__module__):
            return
        self.visited.add(id(kind))
        for key, value in list(vars(kind).items()):
            if not key.startswith("__") or isinstance(value, FunctionType):
                name = f"{key!r} of {kind}"
                self._guard(vars(kind), key, name)
                self._within(value, name, key, True, 0)

    def _object(self, owner: Any, depth: int) -> None:
        """Finds the attributes of `owner`, and of the objects in them."""
        if id(owner) in self.visited or depth > _DEPTH:
            return
        self.visited.add(id(owner))
        is_own = is_users(type(owner).__module__)
        is_nested, depth = is_own or isinstance(owner, torch.optim.Optimizer), depth + (not is_own)
        title = f"{type(owner).__name__} {getattr(owner, 'name', '')!r}"
        for holder, key, value in _entries(owner):
            name = f"attribute {key!r} of {title}"
            self._guard(holder, key, name)
            self._within(value, name, key, is_nested, depth)
        for kind in type(owner).__mro__:
            self._class(kind)
            for key in overridable(kind, owner):
                self._guard(vars(owner), key, f"attribute {key!r} of {title}")

    def _variable(self, variable: Any) -> None:
        if id(variable) not in self.visited:
            self.visited.add(id(variable))
            for key in keras_private.READ_BY_STEPS:
                self._guard(vars(variable), key, f"variable {variable.path!r}")

    def _within(self, value: Any, name: str, key: str, is_nested: bool, depth: int) -> None:
        """Finds what an attribute holds: the attributes of an object, the members of a container.

        A container in a container is guarded by itself where it is `is_nested`: Keras' own are left
        out. A variable outside the model belongs to an optimizer of the user.
        """
        if type(value) in _PLAIN_TYPES:  # most values are
            return
        if isinstance(value, weakref.ref | ContextVar):
            read = value if isinstance(value, weakref.ref) else partial(value.get, None)
            self._guard(Referent(read), key, name)
            value = read()
        for part in _wrapped(value):
            self._within(part, name, key, is_nested, depth)
        if isinstance(value, keras.Variable):
            self._variable(value)
        elif isinstance(value, FunctionType):
            self._function(value)
        elif isinstance(value, type):
            self._class(value)
        elif isinstance(value, (*CONTAINERS, tuple)):
            self._container(value, name, key, is_nested, depth)
        elif _is_entered(value):
            self._object(value, depth)

    def _container(self, container: Any, name: str, key: str, is_nested: bool, depth: int) -> None:
        if id(container) in self.visited or depth > _DEPTH:
            return
        self.visited.add(id(container))
        for member in list(members(container)):
            if isinstance(member, CONTAINERS) and is_nested:
                self._guard({key: member}, key, name)
            self._within(member, name, key, is_nested, depth + (not is_nested))


def _wrapped(value: Any) -> tuple[Any, ...]:
    """Returns the functions and objects in a method, a property or a partial function."""
    if isinstance(value, MethodType):
        return value.__func__, value.__self__
    if isinstance(value, staticmethod | classmethod):
        return (value.__func__,)
    if isinstance(value, property):
        return (value.fget,)
    return (value.func, value.args, value.keywords) if isinstance(value, partial) else ()


def _tensor_dicts(module: Any) -> Iterator[dict[Any, Any]]:
    """The dicts in which a torch module keeps its own parameters and buffers."""
    own: dict[str, Any] = dict(module.named_parameters(recurse=False))
    own.update(module.named_buffers(recurse=False))
    for value in vars(module).values():
        if isinstance(value, dict) and any(value.get(key) is own[key] for key in own):
            yield value


def _entries(owner: Any) -> Iterable[tuple[Holder, str, Any]]:
    """Yields the attributes and slots of an object, with their names."""
    for key, value in list(getattr(owner, "__dict__", {}).items()):
        if key not in keras_private.RUNS_NOTED:
            yield vars(owner), key, value
    for kind in type(owner).__mro__:
        for key in vars(kind).get("__slots__", ()) if is_users(kind.__module__) else ():
            if key not in ("__dict__", "__weakref__"):
                yield attribute_of(owner, key), key, getattr(owner, key, None)


def _is_entered(value: Any) -> bool:
    """Returns whether the attributes of `value` are guarded too."""
    return (
        (hasattr(value, "__dict__") or hasattr(value, "__slots__"))
        and not isinstance(value, (*PLAIN, *_NOT_ENTERED))
        and not keras_private.is_bookkeeping(value)
    )
