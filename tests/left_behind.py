"""Snapshots of a process: before `install()` and after `uninstall()` they are equal.

The whole of shardcore is loaded before, and what torch and Keras load by themselves on the way:
they change themselves then.
"""

import atexit
import functools
import gc
import importlib
import logging
import os
import pkgutil
import sys
import threading
from contextvars import ContextVar
from enum import Enum
from types import FunctionType, MethodType, ModuleType
from typing import Any
from weakref import WeakKeyDictionary

import torch


def load_all() -> None:
    """Import every module of shardcore, but its tests for plug-ins and its command."""
    import shardcore

    for each in pkgutil.walk_packages(shardcore.__path__, "shardcore."):
        if "testing" not in each.name and not each.name.endswith("__main__"):
            importlib.import_module(each.name)


def of_process() -> dict[str, Any]:
    """The environment, the hooks, the threads, the log, and the operators that torch knows."""
    log = logging.getLogger("shardcore")
    return {
        "environment": dict(os.environ),
        "sys.excepthook": _excepthook(),
        "threading.excepthook": threading.excepthook,
        "threads of shardcore": [t.name for t in threading.enumerate() if "shardcore" in t.name],
        "log": (list(log.handlers), log.propagate, log.level),
        "functions at exit": atexit._ncallbacks(),
        "operators": frozenset(torch._C._dispatch_get_all_op_names()),
    }


def _excepthook() -> Any:
    """Of the interpreter, unless it is that of torch, which puts the rank before each line."""
    of_torch = sys.excepthook.__module__.partition(".")[0] == "torch"
    return sys.__excepthook__ if of_torch else sys.excepthook


def of_globals() -> dict[str, Any]:
    """The content of every global of shardcore that may change."""
    return {
        f"{name}.{key}": _content(value, 4)
        for name, module in list(sys.modules.items())
        if name.partition(".")[0] == "shardcore"
        for key, value in vars(module).items()
        if not key.startswith("__")
    }


def of_libraries() -> dict[str, Any]:
    """Every function and class of torch and Keras, and every member of their classes."""
    found: dict[str, Any] = {}
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] not in ("torch", "keras") or not isinstance(module, ModuleType):
            continue
        for key, value in list(vars(module).items()):
            if _is_code(value):
                found[f"{name}.{key}"] = value
            if issubclass(type(value), type) and value.__module__ == name:
                members = {f"{name}.{key}.{m}": v for m, v in vars(value).items() if _is_code(v)}
                found.update(members)
    return found


def differences(before: dict[str, Any], after: dict[str, Any]) -> dict[str, Any]:
    """The entries of `before` that are changed or missing, and the new ones of shardcore."""
    found: dict[str, Any] = {}
    for name, value in before.items():
        now = after.get(name, "nothing")
        if isinstance(value, frozenset) and now != value:
            found[name] = sorted(now - value), sorted(value - now)
        elif now is not value and (_is_code(value) or now != value):
            found[name] = value, now
    return found | {
        name: ("nothing", value)
        for name, value in after.items()
        if name not in before and str(getattr(value, "__module__", "")).startswith("shardcore")
    }


def _is_code(value: Any) -> bool:
    # Some of torch's globals warn when they are asked for their class.
    return issubclass(type(value), _CODE)


_CODE = (FunctionType, type, property, classmethod, staticmethod, functools.cached_property)


def _content(value: Any, depth: int) -> Any:
    """A value as something that stays as it is when the value changes."""
    if isinstance(value, ContextVar):
        return _content(value.get(None), depth)
    if isinstance(value, dict | WeakKeyDictionary):
        return {repr(k): _content(v, depth - 1) for k, v in value.items()} if depth else len(value)
    if isinstance(value, list | tuple | set | frozenset):
        members = sorted(value, key=repr) if isinstance(value, set | frozenset) else value
        return [_content(each, depth - 1) for each in members] if depth else len(value)
    if isinstance(value, Enum):  # does not change, and its class makes new functions when asked
        return repr(value)
    if isinstance(value, MethodType):  # each look-up makes another one
        return id(value.__func__)
    if isinstance(value, FunctionType | type | ModuleType) or callable(value) or not depth:
        return id(value)
    if type(value).__module__.startswith(("shardcore", "collections", "weakref")):
        own = getattr(value, "__dict__", {})
        kept = vars(type(value)).get("__slots__") or {**vars(type(value)), **own}
        names = [each for each in kept if not each.startswith("__")]
        return [(name, _content(getattr(value, name, None), depth - 1)) for name in names]
    return repr(value)


def collect() -> None:
    """Let go of what only rubbish holds."""
    gc.collect()
