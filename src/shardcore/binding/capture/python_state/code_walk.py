"""Walks from the code of steps to what it reads of functions and modules."""

import builtins
import sys
from collections.abc import Iterable
from functools import partial
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any
from weakref import WeakKeyDictionary

import attrs

from shardcore.binding.capture.python_state import code_facts, readers
from shardcore.binding.capture.python_state.known_modules import is_library, is_standard
from shardcore.binding.capture.python_state.object_walk import ObjectWalk
from shardcore.binding.capture.python_state.objects import (
    FUNCTIONS_OF_C,
    is_of,
    namespace_reader,
    wrapped,
)
from shardcore.domain.capture import NotCaptured


@attrs.define(eq=False)
class CodeWalk(ObjectWalk):
    """A walk from the functions that steps call to their closures and global variables."""

    # By the identity of code, the global variables of its function.
    namespaces: dict[int, dict[str, Any]] = attrs.field(factory=dict, init=False)

    @property
    def _probes_attributes(self) -> bool:
        """Whether the user's code may ask for an attribute that is not there."""
        is_trying = any(code.co_exceptiontable for code in self.called.users())
        return is_trying or not self.user_names.isdisjoint(code_facts.PROBES)

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

    def _globals(self, code: CodeType) -> dict[str, Any] | None:
        if space := self.namespaces.get(id(code)):
            return space
        module = sys.modules.get(code_facts.module_of(code))
        return vars(module) if isinstance(module, ModuleType) else None

    def _is_closed(self, code: CodeType) -> bool:
        """Checks that code reads Python's names alone, as methods of a `dataclass` do."""
        known = vars(builtins).keys() | {"_tuple_new"}
        return code.co_filename == "<string>" and self.called.names_of(code).variables <= known

    def _add_cache(self, cached: Any, name: str) -> None:
        """Adds the values that a cache keeps; its function may have run before the first step."""
        function: Any = cached.__wrapped__
        self._add(function, name)
        self.watched.add_identities(partial(readers.cached_values, cached), name)
        if is_of(function, FunctionType) and not code_facts.is_known(function.__code__):
            self._add_globals(function.__code__, function.__globals__)
        for value in readers.cached_values(cached):
            self._add(value, name)

    def _add_function(self, function: FunctionType, name: str) -> None:
        """Adds the defaults, attributes, closure and global variables of a function that ran.

        In the closure of a library's function there may be one of the user's.
        """
        code, watch = function.__code__, self.watched.add_results
        is_own = not code_facts.is_known(code)
        if is_own:
            title = f"function {function.__qualname__}"
            self._add_attributes(vars(function), title, is_library=False)
            self.watched.add_namespace(namespace_reader(function), title)
            if self.shows_names:
                watch(partial(readers.FUNCTION_STATE, function), f"code or defaults of {title}")
                watch(partial(readers.FUNCTION_TEXTS, function), f"names of {title}")
            self._add_read_state(function, title)
        elif is_standard(code_facts.module_of(code)) or function.__name__ in self.user_names:
            self._add_function_of_library(function)  # as `singledispatch` returns
        if not self.called.has_called(code):
            return
        self.visited[id(code)] = code
        of = f"of function {function.__qualname__}"
        for key, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
            title, value = f"variable {key!r} in the closure {of}", readers.read_or_none(cell, None)
            if is_own:
                self.watched.add_result(partial(readers.CELL_CONTENTS, cell), title)
            elif is_of(value, WeakKeyDictionary):
                continue  # `singledispatch` caches there what its `registry` has
            self._add(value, title)
        if not is_own:
            return
        self._note_namespace(code, function.__globals__)
        watch(partial(readers.FUNCTION_STATE, function), f"code or defaults {of}")
        self._add(function.__defaults__, f"defaults {of}")
        self._add(function.__kwdefaults__, f"defaults {of}")

    def _add_function_of_library(self, function: FunctionType) -> None:
        """Adds the attributes, the code and the defaults of a function."""
        title = f"function {function.__qualname__}"
        self._add_attributes(vars(function), title, is_library=True)
        state = partial(readers.FUNCTION_STATE, function)
        self.watched.add_results(state, f"code or defaults of {title}")

    def _add_read_state(self, function: FunctionType, title: str) -> None:
        """Adds what code reads by `__globals__` and `__closure__` of a function."""
        if "__globals__" in self.user_names:
            space = function.__globals__
            self._add_named(space, self.user_names, str(space.get("__name__")))
        if not self.user_names.isdisjoint(code_facts.OF_CLOSURES):
            for cell in function.__closure__ or ():
                self.watched.add_result(partial(readers.CELL_CONTENTS, cell), f"closure of {title}")
                self._add(readers.read_or_none(cell, None), f"closure of {title}")

    def visit_standard_functions(self) -> None:
        """Adds the functions of the standard library that ran, which a program may replace."""
        for name, codes in self.called.standard_functions().items():
            module = vars(sys.modules.get(name, ModuleType(name)))
            classes = [kind for kind in module.values() if is_of(kind, type)]
            for space in (module, *(vars(kind) for kind in classes if kind.__module__ == name)):
                self.methods += (
                    (space, key, f"{name}.{key}")
                    for key, value in space.items()
                    if any(part.__code__ in codes for part in _functions_in(value))
                )

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
                    parts = (f"{full}.{part}" for part in names.attributes)  # `from a import b`
                    for part in filter(sys.modules.__contains__, parts):
                        self._add_import(part)

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

        Of functions of a library the attributes, the code and the defaults are compared.
        """
        space, name = vars(module), str(vars(module).get("__name__"))
        self.watched.add_class(module, f"module {name}")
        if type(module) is not ModuleType:  # it may have properties
            self._add(type(module), f"module {name}")
        if not is_library(name) and not is_standard(name):
            everything = (frozenset(space) - {"__builtins__"}) | self.user_names
            self._add_named(space, everything if self.names is None else self.user_names, name)
            return
        named = tuple(self.user_names & space.keys())
        self.watched.add_attributes(space, named, f"module {name}")
        if self._probes_attributes:
            absent = self.user_names.difference(named)
            self.watched.add_absent_keys(space, absent, f"a variable of {name}")
        for key in named:
            is_passed = is_of(space[key], *FUNCTIONS_OF_C) and key in self.passed_attributes
            is_function = callable(space[key]) and not is_of(space[key], type, MethodType)
            if is_of(space[key], FunctionType):
                self._add_function_of_library(space[key])
            if not is_function or (is_passed and not wrapped(space[key])):
                self._add(space[key], f"variable {key!r} of module {name}")


def _functions_in(value: object) -> list[FunctionType]:
    """Lists a function, or those in a property or a method of a class."""
    return [part for part in (value, *wrapped(value)) if type(part) is FunctionType]
