"""Walks from a model and from the code of its steps to all that this code may read.

An attribute counts if the code that ran names it. What counts is compared, or the step is refused.
"""

import abc
import builtins
import decimal
import logging
import os
import sys
from collections.abc import Iterable
from functools import partial
from types import CodeType, FunctionType, ModuleType
from typing import Any

import attrs
import numpy as np
import torch

from shardcore.binding import keras_private
from shardcore.binding.capture.python_state import code_facts, readers, rules
from shardcore.binding.capture.python_state.object_walk import ObjectWalk
from shardcore.binding.capture.python_state.objects import FUNCTIONS_OF_C, is_of, wrapped
from shardcore.binding.capture.python_state.observed import ObservedCalls
from shardcore.binding.capture.python_state.watched import WatchedValues
from shardcore.binding.capture.signatures import Closures
from shardcore.binding.ranks.rank_consistency import variables_of
from shardcore.domain.capture import NotCaptured
from shardcore.ports.capture import StepCapture


def watch_state(
    trainer: Any,
    called: ObservedCalls,
    capture: StepCapture[torch.Tensor],
    closures: Closures | None = None,
) -> WatchedValues:
    """Walks to all that the steps of `trainer`, which call the functions `called`, may read.

    Args:
        trainer: The model.
        called: The functions.
        capture: Reads what changes of tensors and dicts.
        closures: Of a function that each call makes again: the objects in them. Their key is
            compared elsewhere.

    Raises:
        NotCaptured: If the code may read what cannot be compared.
    """
    captured = closures or Closures.of()

    def walk_by(names: frozenset[str] | None) -> _StepWalk:
        walk = _StepWalk(called, names, WatchedValues(capture.metadata_of, capture.dict_version))
        called.check_calls()
        walk.visit_model(trainer)
        walk.visit_objects(captured.objects)
        walk.visit_code(captured.codes)
        walk.check_weak_references()
        walk.visit_environment()
        return walk

    names = called.attribute_names()
    walk = walk_by(names)
    if walk.names_are_computed and names is not None:
        walk = walk_by(None)
    return walk.watched


@attrs.define(eq=False)
class _StepWalk(ObjectWalk):
    """A walk from a model, and from the functions that its steps call, to all that they hold."""

    # By the identity of code, the global variables of its function.
    namespaces: dict[int, dict[str, Any]] = attrs.field(factory=dict, init=False)

    @property
    def _probes_attributes(self) -> bool:
        """Whether the user's code may ask for an attribute that is not there."""
        is_trying = any(code.co_exceptiontable for code in self.called.users())
        return is_trying or not self.user_names.isdisjoint(code_facts.PROBES)

    def visit_model(self, trainer: Any) -> None:
        self.watched.add_result(keras_private.global_seed, "Keras' global seed generator")
        seed = keras_private.global_seed()
        for variable in [*variables_of(trainer), *([] if seed is None else [seed])]:
            self._add(variable, f"variable {variable.path!r}")
        self.watched.add_content(keras_private.registered_objects, "Keras' registered objects")
        for name, read in keras_private.uncleared_gradients(trainer):
            self.watched.add_result(read, name)
            self._add(read(), name)
        for called, holder, tensors in keras_private.graph_tensors(trainer):
            name = f"an argument of {called!r} in a functional graph"
            self.watched.add_attributes(holder, ("args", "kwargs"), name)
            for tensor in tensors:
                self._add(tensor, name)
        for operation in keras_private.operations_of(trainer):
            self._add(operation, f"operation {operation.name!r}")
        for _, module in keras_private.modules_of(trainer):
            self._add(module, f"module {type(module).__name__!r}")
        for part in keras_private.parts_of(trainer):
            self._add(part, f"{type(part).__name__} of the model")
        self._visit_pending()

    def visit_objects(self, values: Iterable[object]) -> None:
        for value in values:
            self._add(value, f"{type(value).__name__} in a closure")
        self._visit_pending()

    def visit_code(self, compared: Iterable[CodeType]) -> None:
        """Visits what the code of functions reads from their modules.

        The closures of functions that are `compared`, or were made in the step, are not read here.
        """
        users = {id(code): code for code in self.called.users()}
        waiting = dict(users)
        while waiting:
            ready = {key: space for key, code in waiting.items() if (space := self._globals(code))}
            # Only now: a function that is exec'd may be found with the variables of the others.
            ready = ready or {
                key: vars(builtins) for key, code in waiting.items() if self._is_closed(code)
            }
            if not ready:
                location = self.called.names_of(next(iter(waiting.values()))).location
                raise NotCaptured(
                    f"it calls {location}, a function that no module and no layer holds, so that "
                    "its global variables are unknown: make it an attribute of the layer"
                )
            for key, space in ready.items():
                self._add_globals(waiting.pop(key), space)
                self._visit_pending()
        nested_code = {id(constant) for code in users.values() for constant in code.co_consts}
        nested_code |= set(map(id, compared))
        for key, code in users.items():
            has_closure = code.co_freevars not in ((), ("__class__",))
            if has_closure and key not in nested_code and key not in self.visited:
                location = self.called.names_of(code).location
                raise NotCaptured(
                    f"it calls {location}, with a closure that nothing of the model holds: make it "
                    "an attribute of the layer"
                )

    def check_weak_references(self) -> None:
        """Checks that what weak references refer to is held by something else that is compared."""
        for reference, name in self.weak:
            target = reference()
            if target is not None and id(target) not in self.visited:
                raise NotCaptured(
                    f"it reads {name}, a weak reference to an object that the step reads in no "
                    "other way: read it from an attribute of the layer"
                )

    def visit_environment(self) -> None:
        """Adds the environment, loggers and settings of libraries that the user's code reads."""
        watch = self.watched.add_content
        watch(abc.get_cache_token, "the classes that are registered with an ABC")
        for read, title in readers.SETTINGS:
            watch(read, title)
        if not readers.READ_ENVIRONMENT.isdisjoint(self.user_names):
            watch(lambda: dict(os.environ), "os.environ")
        if self.has_decimals or "Decimal" in self.user_names:
            watch(lambda: repr(decimal.getcontext()), "the context of decimal numbers")
        self._add_named(*keras_private.global_state_of(self.user_names), "Keras' global state")
        self._visit_pending()
        if self.called.has_called_module("numpy._core.arrayprint"):
            watch(lambda: repr(np.get_printoptions()), "NumPy's options of printing")
        if "getLogger" in self.user_names:
            loggers = list(logging.root.manager.loggerDict)
            for name in [name for name in loggers if not rules.is_library(name)]:
                self._add(logging.getLogger(name), f"logger {name!r}")
            self._add(logging.root, "the root logger")
            self._visit_pending()

    def _globals(self, code: CodeType) -> dict[str, Any] | None:
        if space := self.namespaces.get(id(code)):
            return space
        module = sys.modules.get(code_facts.module_of(code))
        return vars(module) if isinstance(module, ModuleType) else None

    def _is_closed(self, code: CodeType) -> bool:
        """Checks that code reads Python's names alone, as methods of a `dataclass` do."""
        known = vars(builtins).keys() | {"_tuple_new"}
        return code.co_filename == "<string>" and self.called.names_of(code).variables <= known

    def _add_cached_function(self, function: Any) -> None:
        if is_of(function, FunctionType) and not code_facts.is_known(function.__code__):
            self._add_globals(function.__code__, function.__globals__)

    def _add_function(self, function: FunctionType, name: str) -> None:
        """Adds the defaults, attributes, closure and global variables of a function that ran.

        In the closure of a library's function there may be one of the user's.
        """
        code, watch = function.__code__, self.watched.add_results
        is_own = not code_facts.is_known(code)
        if is_own:
            title = f"function {function.__qualname__}"
            self._add_attributes(vars(function), title, is_library=False)
            if self.user_names & code_facts.OF_FUNCTIONS:
                watch(partial(readers.FUNCTION_STATE, function), f"code or defaults of {title}")
                watch(partial(readers.FUNCTION_TEXTS, function), f"names of {title}")
            self._add_read_state(function, title)
        if not self.called.has_called(code):
            return
        self.visited[id(code)] = code
        of = f"of function {function.__qualname__}"
        for key, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
            title = f"variable {key!r} in the closure {of}"
            if is_own:
                self.watched.add_result(partial(readers.CELL_CONTENTS, cell), title)
            self._add(readers.read_or_none(cell, None), title)
        if not is_own:
            return
        self._note_namespace(code, function.__globals__)
        watch(partial(readers.FUNCTION_STATE, function), f"code or defaults {of}")
        self._add(function.__defaults__, f"defaults {of}")
        self._add(function.__kwdefaults__, f"defaults {of}")

    def _add_read_state(self, function: FunctionType, title: str) -> None:
        """Adds what code reads by `__globals__` and `__closure__` of a function."""
        if "__globals__" in self.user_names:
            space = function.__globals__
            self._add_named(space, self.user_names, str(space.get("__name__")))
        if not self.user_names.isdisjoint(code_facts.OF_CLOSURES):
            for cell in function.__closure__ or ():
                self.watched.add_result(partial(readers.CELL_CONTENTS, cell), f"closure of {title}")
                self._add(readers.read_or_none(cell, None), f"closure of {title}")

    def _note_namespace(self, code: CodeType, namespace: dict[str, Any]) -> None:
        self.namespaces[id(code)] = namespace
        for constant in code.co_consts:
            if isinstance(constant, CodeType):
                self._note_namespace(constant, namespace)

    def _add_globals(self, code: CodeType, namespace: dict[str, Any]) -> None:
        """Adds the global variables that code names, and the modules that it imports."""
        self._note_namespace(code, namespace)
        names, module = self.called.names_of(code), str(namespace.get("__name__"))
        self._add_named(namespace, names.variables, module)
        package = str(namespace.get("__package__") or "")
        for name in names.modules:
            for full in (name, f"{package}.{name}"):
                if full in sys.modules:
                    self._add_import(full)

    def _add_import(self, name: str) -> None:
        """Adds a module that code imports; of `import a.b` also the variable `b` of `a`."""
        self.watched.add_attributes(sys.modules, (name,), "sys.modules")
        self._add(sys.modules[name], f"module {name}")
        parent, _, last = name.rpartition(".")
        if parent in sys.modules:
            self._add_import(parent)
            space = vars(sys.modules[parent])
            if last in space:
                self.watched.add_attributes(space, (last,), f"module {parent}")
                self._add(space[last], f"module {name}")

    def _add_named(self, namespace: dict[str, Any], names: Iterable[str], module: str) -> None:
        """Adds variables of a module; of one that is not there, its absence."""
        present = tuple(name for name in names if name in namespace)
        absent = frozenset(names).difference(present)
        self.watched.add_attributes(namespace, present, f"module {module}")
        if absent:
            self.watched.add_absent_keys(namespace, absent, f"a variable of module {module}")
            own = vars(builtins)
            builtin = tuple(name for name in absent if name in own)
            self.watched.add_attributes(own, builtin, "builtins")
            self.watched.add_absent_keys(own, absent.difference(own), "a name of Python's")
        for name in present:
            value = namespace[name]
            # A function of C that is called shows itself to the profile; a method has an object.
            is_called = is_of(value, *FUNCTIONS_OF_C) and name not in self.passed_variables
            if not is_called or wrapped(value):
                self._add(value, f"global variable {name!r} of {module}")

    def _add_module(self, module: ModuleType) -> None:
        """Adds the variables of a module that the user's code names.

        Functions and classes of a library are compared by identity.
        """
        space, name = vars(module), str(vars(module).get("__name__"))
        if not rules.is_library(name) and not rules.is_standard(name):
            everything = frozenset(space) | self.user_names
            self._add_named(space, everything if self.names is None else self.user_names, name)
            return
        named = tuple(self.user_names & space.keys())
        self.watched.add_attributes(space, named, f"module {name}")
        if self._probes_attributes:
            absent = self.user_names.difference(named)
            self.watched.add_absent_keys(space, absent, f"a variable of {name}")
        for key in named:
            is_passed = is_of(space[key], *FUNCTIONS_OF_C) and key in self.passed_attributes
            is_function = callable(space[key]) and not is_of(space[key], type)
            if not is_function or (is_passed and not wrapped(space[key])):
                self._add(space[key], f"variable {key!r} of module {name}")
