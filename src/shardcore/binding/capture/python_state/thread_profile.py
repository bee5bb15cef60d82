"""Profiles of one thread; from Python 3.12 on cProfile has the calls of all threads.

A notebook's kernel, a progress bar and shardcore's own watch run beside a step; what they call is
no part of it.
"""

import inspect
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from cProfile import Profile
from functools import partial
from types import BuiltinFunctionType, CodeType, MethodDescriptorType, ModuleType
from typing import Any, TypeAlias

import attrs

# The code of a function of Python; cProfile's name of one of C.
Function: TypeAlias = CodeType | str


@contextmanager
def open_profile() -> Iterator[Any]:
    """Opens a profile of this thread.

    From Python 3.12 on cProfile has the calls of all threads; before, it is the one, and faster.
    """
    if sys.version_info < (3, 12):
        profile = Profile(subcalls=True, builtins=True)
        try:
            yield profile
        finally:
            profile.disable()
    else:
        own = ThreadProfile()
        own.start()
        try:
            yield own
        finally:
            own.stop()


def is_profiled() -> bool:
    """Looks for another profiler of Python: there can be no second one."""
    if sys.version_info >= (3, 12):
        return sys.monitoring.get_tool(sys.monitoring.PROFILER_ID) is not None
    return sys.getprofile() is not None


@attrs.define(eq=False)
class Entry:
    """A function and what it calls, as in `cProfile.Profile.getstats()`.

    Args:
        code: The function.
        callcount: The number of functions that call it.
        calls: The functions that it calls.
    """

    code: Function
    callcount: int = 0
    calls: list["Entry"] = attrs.field(factory=list)


@attrs.define(eq=False)
class ThreadProfile:
    """Notes which function calls which on this thread, while it is enabled.

    It has the interface of `cProfile.Profile`, and its place: Python allows one profiler.
    """

    _monitoring: Any = attrs.field(factory=partial(getattr, sys, "monitoring"), init=False)
    _thread: int = attrs.field(factory=threading.get_ident, init=False)
    _is_enabled: bool = attrs.field(default=False, init=False)
    # Code by its id: its hash is that of all its names and constants.
    _codes: dict[int, CodeType] = attrs.field(factory=dict, init=False)
    _calls: dict[tuple[int, int | str], None] = attrs.field(factory=dict, init=False)

    def start(self) -> None:
        """Registers with Python.

        Raises:
            ValueError: If another profiler is at work.
        """
        self._monitoring.use_tool_id(self._monitoring.PROFILER_ID, "shardcore")
        self._listen(self._on_start, self._on_call)
        events = self._monitoring.events
        noted = events.PY_START | events.PY_RESUME | events.CALL
        self._monitoring.set_events(self._monitoring.PROFILER_ID, noted)

    def stop(self) -> None:
        """Removes what `start` has registered."""
        self._monitoring.set_events(self._monitoring.PROFILER_ID, 0)
        self._listen(None, None)
        self._monitoring.free_tool_id(self._monitoring.PROFILER_ID)

    def _listen(self, on_start: Any, on_call: Any) -> None:
        tool, events = self._monitoring.PROFILER_ID, self._monitoring.events
        self._monitoring.register_callback(tool, events.PY_START, on_start)
        self._monitoring.register_callback(tool, events.PY_RESUME, on_start)
        self._monitoring.register_callback(tool, events.CALL, on_call)

    def enable(self) -> None:
        """Begins to note functions."""
        self._is_enabled = True

    def disable(self) -> None:
        """Notes no functions until it is enabled again."""
        self._is_enabled = False

    def getstats(self) -> Sequence[Entry]:
        """Builds, as cProfile does, an entry for each function, with those that it calls."""
        entries: dict[int | str, Entry] = {}

        def entry(key: int | str) -> Entry:
            if key not in entries:
                entries[key] = Entry(self._codes[key] if isinstance(key, int) else key)
            return entries[key]

        for caller, callee in self._calls:
            called = entry(callee)
            called.callcount += 1
            entry(caller).calls.append(Entry(called.code, 1))
        return list(entries.values())

    def _on_start(self, code: CodeType, offset: int) -> None:
        if not self._is_enabled or threading.get_ident() != self._thread:
            return
        frame = inspect.currentframe()
        started = frame and frame.f_back
        if started and started.f_back:
            self._note(started.f_back.f_code, code)

    def _on_call(self, code: CodeType, offset: int, function: object, first: object) -> None:
        kind = type(function)
        if kind is not BuiltinFunctionType and kind is not MethodDescriptorType:
            return
        if not self._is_enabled or threading.get_ident() != self._thread:
            return
        self._note(code, name_of(function))

    def _note(self, caller: CodeType, callee: Function) -> None:
        key = callee if isinstance(callee, str) else id(callee)
        pair = id(caller), key
        if pair not in self._calls:
            self._calls[pair] = None
            self._codes[id(caller)] = caller
            if not isinstance(callee, str):
                self._codes[id(callee)] = callee


def name_of(function: Any) -> str:
    """Names a function of C as cProfile does.

    Example:
        >>> name_of(len), name_of([].append)
        ('<built-in method builtins.len>', "<method 'append' of 'list' objects>")
    """
    if type(function) is MethodDescriptorType:
        return repr(function)
    owner, name = function.__self__, function.__name__
    if not isinstance(owner, ModuleType):
        for base in type(owner).__mro__:
            method = vars(base).get(name)
            if type(method) in (MethodDescriptorType, BuiltinFunctionType):
                return repr(method)
    module = function.__module__
    return f"<built-in method {module}.{name}>" if module else f"<built-in method {name}>"
