"""The user's functions that a step calls, and the names that they look up."""

import builtins
import datetime
import dis
import gc
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from cProfile import Profile
from types import BuiltinFunctionType, CodeType, ModuleType
from typing import Any

import attrs

from shardcore.domain.steps.capture import NotCaptured

# Code of these packages reads nothing that changes between steps, but what `keras.config` sets.
_LIBRARIES = sys.stdlib_module_names | {"attr", "attrs", "keras", "numpy", "shardcore", "torch"}

_CLOCKS = ("time", "monotonic", "perf_counter", "process_time", "thread_time")
# What one of these returns may be something else in the next step, and cannot be compared.
UNGUARDED = {
    *(getattr(time, name + suffix) for name in _CLOCKS for suffix in ("", "_ns")),
    datetime.datetime.now,
    datetime.datetime.today,
    datetime.datetime.utcnow,
    datetime.date.today,
    *(builtins.open, builtins.input, builtins.globals, builtins.eval, builtins.exec),
    *(os.urandom, os.listdir, os.scandir, os.stat),
}


def is_users(module: str) -> bool:
    """Whether the module is the user's, or of a library that is not known to be without state."""
    return module.partition(".")[0] not in _LIBRARIES


@attrs.frozen
class Names:
    """The names in the code of a function.

    Args:
        variables: Names of global variables.
        attributes: Names of attributes, and texts, which may be names for `getattr`.
        modules: Names of modules that it imports.
        place: Where the function is, for people.
    """

    variables: frozenset[str]
    attributes: frozenset[str]
    modules: frozenset[str]
    place: str

    @classmethod
    def of(cls, code: CodeType) -> "Names":
        """Returns the names in `code`, without those of the functions within it."""
        variables, modules = set(), set()
        for each in dis.get_instructions(code):
            if each.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
                variables.add(each.argval)
            elif each.opname == "IMPORT_NAME":
                modules.add(each.argval)
        texts = {each for each in code.co_consts if isinstance(each, str)}
        attributes = texts.union(code.co_names)
        place = f"{code.co_qualname} ({code.co_filename}:{code.co_firstlineno})"
        return cls(frozenset(variables), frozenset(attributes), frozenset(modules), place)


def check_guarded(function: object, names: Names) -> None:
    """Refuses a `function` that may return something else in each step."""
    if isinstance(function, BuiltinFunctionType) and function in UNGUARDED:
        raise NotCaptured(
            f"{names.place} calls {function.__qualname__}(), which may return something else in "
            "each step: pass that in the batch, or keep it in a variable"
        )


@attrs.define(eq=False)
class CalledFunctions:
    """The functions that steps have called."""

    _codes: dict[int, CodeType] = attrs.field(factory=dict, init=False)

    @contextmanager
    def observed(self) -> Iterator[Profile]:
        """Notes what this thread calls, by cProfile: no function of Python runs at each call."""
        profile = Profile(subcalls=False, builtins=False)
        try:
            yield profile
        finally:
            profile.disable()
        codes = (each.code for each in profile.getstats())
        self._codes |= {id(each): each for each in codes if isinstance(each, CodeType)}

    def users(self) -> list[tuple[CodeType, dict[str, Any]]]:
        """Returns the code in the files of the user's modules, with the variables of its module."""
        # By their dicts: a module may import others when it is asked for an attribute.
        loaded = [sys.modules.get(name) for name in filter(is_users, list(sys.modules))]
        found = [vars(each) for each in loaded if isinstance(each, ModuleType)]
        modules = {each.get("__file__"): each for each in found}
        collector = [getattr(each, "__code__", None) for each in gc.callbacks]  # no part of a step
        codes = [each for each in self._codes.values() if each not in collector]
        return [(each, modules[each.co_filename]) for each in codes if each.co_filename in modules]

    def has_called(self, code: CodeType) -> bool:
        """Whether a step called the function with this code."""
        return id(code) in self._codes

    def names(self) -> set[str]:
        """Returns all names in the code that ran, libraries included."""
        return {
            name for each in self._codes.values() for name in (*each.co_names, *each.co_freevars)
        }


def is_profiled() -> bool:
    """Whether a profiler of Python is at work: there can be no second one."""
    if sys.version_info >= (3, 12):
        return sys.monitoring.get_tool(sys.monitoring.PROFILER_ID) is not None
    return sys.getprofile() is not None


@contextmanager
def without_collection() -> Iterator[None]:
    """Pauses Python's garbage collection, which takes a quarter of the time of a recording."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
