"""Functions and classes of C that a step holds or passes on, of whose calls no profile knows."""

import sys
from importlib.machinery import EXTENSION_SUFFIXES
from types import BuiltinFunctionType, ModuleType
from typing import Any

from shardcore.binding.capture.python_state import rules
from shardcore.binding.capture.python_state.observed import ObservedCalls
from shardcore.domain.capture import NotCaptured

# The flag of a class that was made at run time, as all of Python are (Py_TPFLAGS_HEAPTYPE).
_IS_HEAP_TYPE = 1 << 9


def check_function(function: Any, called: ObservedCalls) -> None:
    """Checks a function of C that other C code may call, as `map(os.access, paths)` does.

    Raises:
        NotCaptured: If it may read what no guard compares.
    """
    name = name_of(function)
    if why := rules.why_unknown(name):
        raise NotCaptured(f"{called.caller_of(name)} {why}: {rules.remedy(name)}")


def check_class(kind: type, called: ObservedCalls) -> None:
    """Checks a class of C, which code may make and iterate over: `io.FileIO(path)`.

    Raises:
        NotCaptured: If it may read what no guard compares.
    """
    name = f"{kind.__module__}.{kind.__qualname__}"
    if is_of_c(kind) and not rules.is_known_class(name):
        raise NotCaptured(
            f"{called.caller_of(name)} uses {name}, a class of C that may read anything: "
            f"{rules.remedy(name)}"
        )


def name_of(function: Any) -> str:
    """Returns the name that `cProfile` has for a function of C.

    Example:
        >>> name_of([].append), name_of(len)
        ("<method 'append' of 'list' objects>", '<built-in method builtins.len>')
    """
    if not isinstance(function, BuiltinFunctionType):
        return repr(function)
    owner, name = function.__self__, function.__name__
    if owner is None or isinstance(owner, ModuleType):
        return f"<built-in method {function.__module__ or ''}.{name}>"
    kinds = (vars(kind) for kind in type(owner).__mro__)
    methods = (repr(space[name]) for space in kinds if name in space)
    return next(methods, f"<built-in method {name}>")


def is_of_c(kind: Any) -> bool:
    """Returns whether a class is written in C.

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
