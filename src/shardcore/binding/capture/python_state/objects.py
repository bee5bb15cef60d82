"""Looks at objects without running code of their classes: no `__getattr__`, no property."""

import datetime
import decimal
import gc
import logging
import random
import re
import sys
import threading
import types
import weakref
from array import array
from collections import OrderedDict, defaultdict, deque, namedtuple
from collections.abc import Callable
from contextvars import ContextVar
from functools import cache, lru_cache, partial
from importlib.machinery import EXTENSION_SUFFIXES
from operator import attrgetter, is_, itemgetter, methodcaller
from types import GetSetDescriptorType, MappingProxyType, MemberDescriptorType, SimpleNamespace
from typing import Any

import numpy as np
import torch

from shardcore.binding.capture.python_state.known_modules import is_library
from shardcore.binding.capture.signatures import PLAIN

# Classes of C whose state is known to the walk, or does not change.
CACHED = type(lru_cache(len))
VIEWS: tuple[type, ...] = (type({}.keys()), type({}.values()), type({}.items()), MappingProxyType)
PLAIN_TYPES = frozenset(PLAIN)
ORDERED = (OrderedDict, defaultdict)
MUTABLE = (list, dict, set, deque, *ORDERED)
CONTAINERS = (list, tuple, dict, set, frozenset, deque)
LOOKUPS = (attrgetter, methodcaller)
PROXIES = (weakref.ProxyType, weakref.CallableProxyType)
# The flag of a class that was made at run time, as all of Python are (Py_TPFLAGS_HEAPTYPE).
_IS_HEAP_TYPE = 1 << 9
_IMMUTABLE_MODULES = frozenset(
    {
        *("datetime", "decimal", "_decimal", "fractions", "uuid", "zoneinfo", "ipaddress"),
        *("pathlib", "inspect", "_abc"),
    }
)
# The descriptors of a namedtuple have no public name; those of Python 3.12 name another module.
_IMMUTABLE = (
    *(type(torch.ops.aten.add), type(torch.ops.aten.add.Tensor)),
    type(vars(namedtuple("Pair", "first second"))["first"]),
)
FUNCTIONS_OF_C = (
    *(types.BuiltinFunctionType, types.MethodDescriptorType, types.ClassMethodDescriptorType),
    *(types.MethodWrapperType, types.WrapperDescriptorType),
)
# What Cython makes of the functions of a package: all packages share the class.
_FUNCTION_OF_CYTHON = type(vars(np.random.RandomState)["random"])
_KNOWN_TO_THE_WALK = (
    *(*PLAIN, *CONTAINERS, *ORDERED, *VIEWS, *LOOKUPS, CACHED, partial, SimpleNamespace, type),
    *(torch.Tensor, torch.Generator, torch.Size, np.ndarray, np.generic, np.dtype, np.ufunc),
    *(types.FunctionType, *FUNCTIONS_OF_C, types.MethodType, types.ModuleType),
    *(GetSetDescriptorType, MemberDescriptorType),
    *(property, staticmethod, classmethod, super, slice, range, ContextVar),
    *(weakref.ref, *PROXIES),
    *(types.CodeType, types.GenericAlias, types.UnionType, type(...), type(NotImplemented)),
    *(re.Pattern, itemgetter, threading.local, type(threading.Lock()), type(threading.RLock())),
    *(bytearray, array, memoryview, random.Random, np.random.Generator, np.random.RandomState),
    *(np.random.BitGenerator, np.random.SeedSequence, decimal.Decimal, BaseException),
    *(types.CellType, type(type.__dict__["__mro__"]), logging.Logger),
)


@cache
def _dict_descriptor(kind: Any, bases: tuple[type, ...]) -> Any:
    for base in bases:
        descriptor = vars(base).get("__dict__")
        if descriptor is not None:
            is_of_c = isinstance(descriptor, GetSetDescriptorType | MemberDescriptorType)
            return descriptor if is_of_c else None
    return None


def attributes_of(owner: Any) -> dict[str, Any] | None:
    """Reads the `__dict__` of an object by C alone; None without one.

    Example:
        >>> class Strict:
        ...     def __getattribute__(self, name):
        ...         raise RuntimeError(name)
        >>> strict = Strict()
        >>> object.__setattr__(strict, "rate", 0.5)
        >>> attributes_of(strict)
        {'rate': 0.5}
    """
    if is_of(owner, type):
        return None
    kind: Any = type(owner)
    descriptor = _dict_descriptor(kind, kind.__mro__)  # the bases of a class may be replaced
    return None if descriptor is None else descriptor.__get__(owner)


def namespace_reader(owner: Any) -> Any:
    """Builds a function of C that reads the `__dict__` of an object which has one."""
    kind: Any = type(owner)
    if is_of(owner, threading.local):
        return partial(threading.local.__getattribute__, owner, "__dict__")
    return partial(_dict_descriptor(kind, kind.__mro__).__get__, owner)


@cache
def slots_of(kind: Any) -> tuple[tuple[str, Any], ...]:
    """Lists the slots of a Python class and its bases: names, and what reads them.

    Example:
        >>> class Point:
        ...     __slots__ = "__x"
        >>> [name for name, slot in slots_of(Point)]
        ['_Point__x']
    """
    return tuple(
        (key, value)
        for base in kind.__mro__
        if "__slots__" in vars(base)
        for key, value in vars(base).items()
        if type(value) is MemberDescriptorType
    )


def refers_to(proxy: Any, value: Any) -> bool:
    """Tells whether a `weakref.proxy` is one of an object; it runs no code of its class."""
    return any(map(partial(is_, proxy), weakref.getweakrefs(value)))


def is_library_function(value: Any) -> bool:
    """Tells a function that Cython made for a known library, as `np.random.normal`."""
    return is_of(value, _FUNCTION_OF_CYTHON) and is_library(str(value.__module__))


@cache
def overrides_torch_function(kind: Any) -> bool:
    """Tells whether a class of tensors has own code that runs with torch's functions.

    Example:
        >>> overrides_torch_function(torch.nn.Parameter)
        False
    """
    base = next((base for base in kind.__mro__ if "__torch_function__" in vars(base)), object)
    return not is_library(base.__module__) and base is not object


def kind_name(kind: type) -> str:
    """Names a class in words for messages.

    Example:
        >>> kind_name(type(iter([])))
        'an iterator (list_iterator)'
    """
    if kind.__module__ == "_io":
        return f"a file ({kind.__qualname__})"
    if issubclass(kind, weakref.ProxyType | weakref.CallableProxyType):
        return "a weakref.proxy"
    if "__next__" in vars(kind):
        return f"an iterator ({kind.__qualname__})"
    return f"an object of class {kind.__module__}.{kind.__qualname__}".replace("builtins.", "")


@cache
def has_unknown_state(kind: Any) -> bool:
    """Looks for a base of a class with state in C that the walk does not know.

    A class of Python adds a dict, weak references and slots to the size of its base, and no more.

    Example:
        >>> import itertools
        >>> has_unknown_state(itertools.count), has_unknown_state(deque)
        (True, False)
    """
    for base in kind.__mro__:
        if base is object:
            break
        if (
            base in (*_KNOWN_TO_THE_WALK, *_IMMUTABLE)
            or base.__module__.partition(".")[0] in _IMMUTABLE_MODULES
        ):
            return False
        parent = base.__base__ or object
        slots = len(slots_of(base)) if "__slots__" in vars(base) else 0
        own = slots + ("__dict__" in vars(base)) + ("__weakref__" in vars(base))
        grown = base.__basicsize__ - parent.__basicsize__
        if grown > own * 8 or base.__itemsize__ != parent.__itemsize__:
            return True
    return False


@cache
def is_immutable(kind: Any) -> bool:
    """Tells whether the instances of a class of the standard library never change."""
    return issubclass(kind, _IMMUTABLE) or kind.__module__.partition(".")[0] in _IMMUTABLE_MODULES


@cache
def iterates_plainly(kind: Any) -> bool:
    """Checks that a class of containers overrides no iteration or length of Python's.

    Example:
        >>> class Loud(list):
        ...     def __len__(self):
        ...         raise RuntimeError
        >>> iterates_plainly(list), iterates_plainly(Loud)
        (True, False)
    """
    base = next((base for base in kind.__mro__ if base in MUTABLE), None)
    names = ("__iter__", "__len__", "keys", "values", "__bool__")
    return base is not None and all(
        getattr(kind, name, None) is getattr(base, name, None) for name in names
    )


def is_of(value: Any, *kinds: type) -> bool:
    """Checks the real class of a value, whatever its `__class__` says."""
    return issubclass(type(value), kinds)


def name_of(function: Any) -> str:
    """Names a function of C as `cProfile` does.

    Example:
        >>> name_of([].append), name_of(len)
        ("<method 'append' of 'list' objects>", '<built-in method builtins.len>')
    """
    if not isinstance(function, types.BuiltinFunctionType):
        return repr(function)
    owner, name = function.__self__, function.__name__
    if owner is None or isinstance(owner, types.ModuleType):
        return f"<built-in method {function.__module__ or ''}.{name}>"
    kinds = (vars(kind) for kind in type(owner).__mro__)
    methods = (repr(space[name]) for space in kinds if name in space)
    return next(methods, f"<built-in method {name}>")


def is_of_c(kind: Any) -> bool:
    """Tells a class of C, static or of an extension module, from one of Python.

    Example:
        >>> import fractions, io
        >>> is_of_c(io.FileIO), is_of_c(fractions.Fraction)
        (True, False)
    """
    if not kind.__flags__ & _IS_HEAP_TYPE:
        return True
    spec = getattr(sys.modules.get(kind.__module__), "__spec__", None)
    origin = str(getattr(spec, "origin", ""))
    return origin == "built-in" or origin.endswith(tuple(EXTENSION_SUFFIXES))


def wrapped(value: Any) -> tuple[Any, ...]:
    """Lists the functions and objects in a method, a property, a partial function or the like.

    Example:
        >>> wrapped(partial(max, 1, key=len))
        (<built-in function max>, (1,), {'key': <built-in function len>})
    """
    kinds = type(value).__mro__
    return next((list_parts(value) for kind, list_parts in _PARTS if kind in kinds), ())


def _members(kind: type, *names: str) -> tuple[type, Callable[[Any], tuple[Any, ...]]]:
    """Makes what reads members of C of a class: a subclass may have properties of these names."""
    members: list[Any] = [vars(kind)[name] for name in names]
    return kind, lambda value: tuple(member.__get__(value) for member in members)


def _referents_of(value: Any) -> tuple[Any, ...]:
    return tuple(gc.get_referents(value))


def _owner_of(function: types.BuiltinFunctionType) -> tuple[Any, ...]:
    owner = function.__self__
    return () if is_of(owner, types.ModuleType, type) else (owner,)


_PARTS: tuple[tuple[type, Callable[[Any], tuple[Any, ...]]], ...] = (
    _members(types.MethodType, "__func__", "__self__"),
    _members(staticmethod, "__func__"),
    _members(classmethod, "__func__"),
    _members(property, "fget", "fset"),
    _members(partial, "func", "args", "keywords"),
    _members(types.MethodWrapperType, "__self__"),
    _members(BaseException, "args", "__cause__", "__context__"),
    _members(super, "__self__", "__thisclass__"),
    _members(datetime.datetime, "tzinfo"),
    _members(datetime.time, "tzinfo"),
    _members(np.flatiter, "base"),
    _members(types.GenericAlias, "__origin__", "__args__"),
    _members(types.UnionType, "__args__"),
    (types.BuiltinFunctionType, _owner_of),
    *((kind, _referents_of) for kind in (*VIEWS, memoryview, types.CellType)),
)
