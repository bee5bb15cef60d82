"""The user's functions that a step calls, and the names that they look up."""

import builtins
import datetime
import dis
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import CodeType
from typing import Any

import attrs

# Code of these packages reads nothing that changes between steps, but what `keras.config` sets.
_LIBRARIES = sys.stdlib_module_names | {"attr", "attrs", "keras", "numpy", "shardcore", "torch"}

_CLOCKS = ("time", "monotonic", "perf_counter", "process_time", "thread_time")
# What a function of these returns may be something else in the next step, and cannot be compared.
_UNGUARDED = {
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
    """

    variables: frozenset[str]
    attributes: frozenset[str]
    modules: frozenset[str]

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
        return cls(frozenset(variables), frozenset(attributes), frozenset(modules))


@attrs.frozen(eq=False)
class CalledCode:
    """Code that ran in a step.

    Args:
        code: The code of a function.
        namespace: The global variables of its module.
    """

    code: CodeType
    namespace: dict[str, Any]

    @property
    def module(self) -> str:
        """The name of its module."""
        return str(self.namespace.get("__name__", ""))


@attrs.define(eq=False)
class CalledFunctions:
    """The functions that steps have called.

    Attributes:
        unguarded: Why a step cannot be captured: it called what returns something else each time,
            and where. Empty if it can.
    """

    unguarded: str = attrs.field(default="", init=False)
    _codes: dict[int, CalledCode] = attrs.field(factory=dict, init=False)

    @contextmanager
    def observed(self) -> Iterator[None]:
        """Notes what this thread calls; a profiler that is at work pauses meanwhile."""
        profiler = sys.getprofile()
        sys.setprofile(self._note)
        try:
            yield
        finally:
            sys.setprofile(None)
            # One of cProfile's, in Python 3.11, is no function.
            getattr(profiler, "enable", lambda: sys.setprofile(profiler))()

    def _note(self, frame: Any, event: str, function: Any) -> None:
        if event == "call":
            code = frame.f_code
            if id(code) not in self._codes:
                self._codes[id(code)] = CalledCode(code, frame.f_globals)
        elif event == "c_call" and function in _UNGUARDED and not self.unguarded:
            self._note_unguarded(frame, function)

    def _note_unguarded(self, frame: Any, function: Any) -> None:
        if is_users(str(frame.f_globals.get("__name__", ""))):
            self.unguarded = (
                f"{function.__qualname__}(), which may return something else in each step, is "
                f"called at {frame.f_code.co_filename}:{frame.f_lineno}"
            )

    def users(self) -> list[CalledCode]:
        """Returns the code that is the user's."""
        return [each for each in self._codes.values() if is_users(each.module)]

    def has_called(self, code: CodeType) -> bool:
        """Whether a step called the function with this code."""
        return id(code) in self._codes

    def reads(self, name: Any) -> bool:
        """Whether some code that ran, of a library too, has `name` in it."""
        return any(
            name in each.code.co_names or name in each.code.co_freevars
            for each in self._codes.values()
        )
