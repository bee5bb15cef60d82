"""The module that code belongs to: a library's, Python's or the user's."""

import os
import re
import sys
from functools import cache, lru_cache
from types import CodeType, ModuleType
from typing import TypeGuard

import attrs

from shardcore.binding.capture.python_state import rules

# Code that has no file: of modules that Python contains, and methods that attrs makes.
_GENERATED = re.compile(r"<(?:frozen|attrs generated \w+) ([\w.]+)>")


@attrs.frozen
class Origin:
    """The module that code belongs to.

    Args:
        module: Its name; empty if no module has the code's file: it is the user's.
        is_library: Whether it is of a library whose reads are compared.
        is_standard: Whether it is of the standard library.
        is_pure: Whether it is of the standard library, and depends on its operands only.
        is_effect: Whether it prints or logs.
    """

    module: str
    is_library: bool
    is_standard: bool
    is_pure: bool
    is_effect: bool


def origin_of(code: CodeType) -> Origin:
    """Returns the origin of code."""
    return _origin_of_module(_module_with(code.co_filename))


@cache
def _origin_of_module(name: str) -> Origin:
    """Returns the origin of the code of a module."""
    is_effect = name.partition(".")[0] in rules.EFFECTS
    return Origin(
        name, rules.is_library(name), rules.is_standard(name), rules.is_pure(name), is_effect
    )


def is_known(code: object) -> bool:
    """Returns whether code is a library's, which reads only what is compared."""
    if not is_python(code):
        return True
    origin = origin_of(code)
    return origin.is_library or (origin.is_pure and code.co_name != "<lambda>")


def is_trusted(code: object) -> bool:
    """Returns whether what code calls is no read of the user's."""
    if not is_python(code):
        return True
    origin = origin_of(code)
    return origin.is_library or origin.is_effect or is_module_body(code)


def is_users(code: object) -> bool:
    """Returns whether code is neither a library's nor Python's: it counts, whoever calls it."""
    if not is_python(code):
        return False
    origin = origin_of(code)
    return not origin.is_standard and not origin.is_library


def is_python(function: object) -> TypeGuard[CodeType]:
    """Returns whether a function of a profile is Python, and not C."""
    return isinstance(function, CodeType)


def is_module_body(code: object) -> bool:
    """Returns whether code is the body of a module, which runs when it is imported.

    What `exec` and `eval` run has the same name, and is refused where they are called.
    """
    return isinstance(code, CodeType) and code.co_name == "<module>"


def _module_with(file: str) -> str:
    """Returns the name of the module that has a file, or of the library; empty without one."""
    if generated := _GENERATED.match(file):
        return generated.group(1)
    return _names_by_file(len(sys.modules)).get(file) or _library_with(file)


def _library_with(file: str) -> str:
    """Returns the library in whose folder a file is; empty without one.

    A module may take its own place in `sys.modules`, as `torch._VF` does.
    """
    for name in rules.LIBRARIES:
        module = sys.modules.get(name)
        folder = os.path.dirname(getattr(module, "__file__", None) or "")
        if folder and file.startswith(folder + os.sep):
            return name
    return ""


@lru_cache(maxsize=1)
def _names_by_file(_loaded: int) -> dict[str, str]:
    """Returns the name of each loaded module by its file; looks again when others are loaded.

    By their dicts: a module may import others when it is asked for an attribute.
    """
    names: dict[str, str] = {}
    for name, module in list(sys.modules.items()):
        if isinstance(module, ModuleType):
            file = vars(module).get("__file__")
            if isinstance(file, str):
                names.setdefault(file, name)
    return names
