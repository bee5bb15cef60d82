"""Facts of code: the module it belongs to, and the names it looks up in modules and on objects."""

import builtins
import dis
import os
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache, wraps
from itertools import takewhile
from types import CodeType, ModuleType
from typing import Any, TypeAlias, TypeGuard

import attrs

from shardcore.binding.capture.python_state.known_modules import (
    LIBRARIES,
    is_effect,
    is_library,
    is_pure,
    is_standard,
)

# Code that has no file: of modules that Python contains, and methods that attrs makes.
_GENERATED = re.compile(r"<(?:frozen|attrs generated \w+) ([\w.]+)>")
# The names that code gave to `getattr` and `hasattr`, by the id of the code: to hash it takes a
# microsecond.
LookedUp: TypeAlias = dict[int, tuple[CodeType, set[str]]]
# Functions that look up attributes by a name that they are given.
LOOKUPS = frozenset({"getattr", "hasattr"})
# Names of what reads all attributes of an object, or those whose names are in a value.
_ALL = frozenset(
    {
        *("vars", "dir", "__dict__", "__getattribute__", "attrgetter", "methodcaller"),
        *("copy", "deepcopy", "asdict", "astuple", "fields", "evolve", "getattr_static"),
        "__get__",
    }
)
# Names by which code reads these of a function, which need not run.
OF_FUNCTIONS = frozenset(
    {
        *("__code__", "__defaults__", "__kwdefaults__", "signature", "getfullargspec"),
        *("__name__", "__qualname__", "__doc__", "__module__", "getdoc", "getsource"),
    }
)
OF_CLOSURES = frozenset({"__closure__", "cell_contents", "getclosurevars"})
# Names of what makes a text of any object.
_TEXTS = frozenset({"str", "repr", "ascii", "format", "format_map", "join", "print", "__repr__"})
# Functions that ask for an attribute which may not be there.
PROBES = frozenset({"getattr", "hasattr", "vars", "__dict__"})
_IDENTIFIER = re.compile(r"[A-Za-z_]\w*")
# Instructions that load a value by a name or from a constant, and change nothing.
_LOADS = ("LOAD_FAST", "LOAD_DEREF", "LOAD_GLOBAL", "LOAD_ATTR", "LOAD_NAME", "LOAD_CLOSURE")
# Instructions of `match`, with the abstract class whose members they accept.
_PATTERNS = {"MATCH_SEQUENCE": "Sequence", "MATCH_MAPPING": "Mapping"}
_VARIABLES = ("LOAD_GLOBAL", "LOAD_NAME")
_IGNORED = frozenset({"PUSH_NULL", "PRECALL", "CACHE", "NOP", "RESUME", "COPY_FREE_VARS"})


def module_of(code: CodeType) -> str:
    """Looks up the module, or the library, that has the file of code; empty without: a user's."""
    if generated := _GENERATED.match(code.co_filename):
        return generated.group(1)
    name = _names_by_file(len(sys.modules)).get(code.co_filename)
    return name or _library_with(code.co_filename)


def is_known(code: object) -> bool:
    """Tells whether code is a library's, which reads only what is compared."""
    if not is_python(code):
        return True
    module = module_of(code)
    return is_library(module) or (is_pure(module) and code.co_name != "<lambda>")


def is_trusted(code: object) -> bool:
    """Tells whether what code calls is no read of the user's."""
    if not is_python(code):
        return True
    module = module_of(code)
    return is_library(module) or is_effect(module) or is_module_body(code)


def is_users(code: object) -> bool:
    """Tells whether code is neither a library's nor Python's: it counts, whoever calls it."""
    if not is_python(code):
        return False
    module = module_of(code)
    return not is_standard(module) and not is_library(module)


def is_python(function: object) -> TypeGuard[CodeType]:
    """Tells Python from C among the functions of a profile."""
    return isinstance(function, CodeType)


def is_module_body(code: object) -> bool:
    """Tells whether code is the body of a module, which runs when it is imported.

    What `exec` and `eval` run has the same name, and is refused where they are called.
    """
    return isinstance(code, CodeType) and code.co_name == "<module>"


def _library_with(file: str) -> str:
    # A module may take its own place in `sys.modules`, as `torch._VF` does.
    for name in LIBRARIES:
        module = sys.modules.get(name)
        folder = os.path.dirname(getattr(module, "__file__", None) or "")
        if folder and file.startswith(folder + os.sep):
            return name
    return ""


@lru_cache(maxsize=1)
def _names_by_file(_loaded: int) -> dict[str, str]:
    # By their dicts: a module may import others when it is asked for an attribute.
    names: dict[str, str] = {}
    for name, module in list(sys.modules.items()):
        if isinstance(module, ModuleType):
            file = vars(module).get("__file__")
            if isinstance(file, str):
                names.setdefault(file, name)
    return names


@attrs.frozen
class Names:
    """The names in the code of a function, without those of the functions within it.

    Args:
        variables: Names of global variables.
        attributes: Names of attributes and keys: all names, and all strings.
        passed_variables: Those that may be passed on: others are called where they are loaded.
        passed_attributes: Likewise.
        modules: Names of modules that it imports.
        makes_text: Whether it may turn objects into text, which has their names.
        are_complete: Whether all other names are seen while they are looked up: by calls of
            `getattr` and `hasattr`, see `noted_lookups`.
        location: The function and its line, for messages.
    """

    variables: frozenset[str]
    attributes: frozenset[str]
    passed_variables: frozenset[str]
    passed_attributes: frozenset[str]
    modules: frozenset[str]
    makes_text: bool
    are_complete: bool
    location: str

    @classmethod
    def of(cls, code: CodeType) -> "Names":
        """Reads the instructions and constants of `code`.

        Example:
            >>> def scaled(layer, x):
            ...     return x * getattr(layer, "scale", 1.0) * RATE
            >>> names = Names.of(scaled.__code__)
            >>> "scale" in names.attributes, "RATE" in names.variables, names.are_complete
            (True, True, True)
        """
        instructions = list(dis.get_instructions(code))
        variables = [
            instruction.argval for instruction in instructions if instruction.opname in _VARIABLES
        ]
        modules = [step.argval for step in instructions if step.opname == "IMPORT_NAME"]
        strings = set(_strings(code.co_consts))
        attributes = {*code.co_names, *strings}
        loads = [step for step in instructions if _loads_value(step)]
        passed = {step.argval for step in loads if step.opname in _VARIABLES}
        if any(instruction.opname == "MATCH_CLASS" for instruction in instructions):
            attributes.add("__match_args__")
        attributes |= {_PATTERNS[step.opname] for step in instructions if step.opname in _PATTERNS}
        return cls(
            frozenset(variables),
            frozenset(attributes),
            frozenset(passed | strings),
            frozenset({step.argval for step in loads if step.opname not in _VARIABLES} | strings),
            frozenset(modules),
            bool(_TEXTS & attributes) or any(map(_makes_text, instructions)),
            not attributes & _ALL and _are_called(instructions),
            f"{code.co_qualname} ({code.co_filename}:{code.co_firstlineno})",
        )


def _strings(constants: tuple[object, ...]) -> Iterator[str]:
    for constant in constants:
        if isinstance(constant, str):
            yield constant
            if "{" in constant:  # a format such as "{0.rate}", whose names are attributes
                yield from _IDENTIFIER.findall(constant)
        elif isinstance(constant, tuple | frozenset):
            yield from _strings(tuple(constant))


def _makes_text(step: dis.Instruction) -> bool:
    is_remainder = step.opname == "BINARY_OP" and step.argrepr in ("%", "%=")  # "%s" % value
    return is_remainder or step.opname.startswith(("FORMAT_", "CONVERT_VALUE"))


def _loads_value(step: dis.Instruction) -> bool:
    if step.opname in ("LOAD_NAME", "IMPORT_FROM"):
        return True
    is_attribute = step.opname == "LOAD_ATTR"  # Python 3.11 loads by LOAD_METHOD what is called
    is_called = bool((step.arg or 0) & 1) and not (is_attribute and sys.version_info < (3, 12))
    return (is_attribute or step.opname == "LOAD_GLOBAL") and not is_called


def _are_called(instructions: list[dis.Instruction]) -> bool:
    # Else code may pass `getattr` and `hasattr` on, and something else looks up.
    steps = [step for step in instructions if step.opname not in _IGNORED]
    return all(
        (step.opname == "LOAD_GLOBAL" and bool((step.arg or 0) & 1))
        or _names_a_constant(steps[index + 1 :])
        for index, step in enumerate(steps)
        if step.argval in LOOKUPS and step.opname != "LOAD_CONST"
    )


def _names_a_constant(steps: list[dis.Instruction]) -> bool:
    loads = list(takewhile(lambda step: step.opname.startswith(_LOADS), steps))
    name, *after = steps[len(loads) : len(loads) + 3]
    has_default = not after[0].opname.startswith("CALL") and after[0].opname.startswith("LOAD")
    call = after[-1] if has_default else after[0]
    is_text = name.opname == "LOAD_CONST" and isinstance(name.argval, str)
    return bool(loads) and is_text and call.opname.startswith("CALL")


@contextmanager
def noted_lookups(names_by_caller: LookedUp) -> Iterator[None]:
    """Adds the names that `getattr` and `hasattr` get meanwhile, by the code that calls them.

    `getattr(self, f"block_{i}")` has no name in its code, and no profile sees arguments: so both
    functions are replaced.
    """
    originals = {name: getattr(builtins, name) for name in LOOKUPS}
    for name, original in originals.items():
        setattr(builtins, name, _noting(original, names_by_caller))
    try:
        yield
    finally:
        for name, original in originals.items():
            setattr(builtins, name, original)


def _noting(original: Callable[..., Any], names_by_caller: LookedUp) -> Callable[..., Any]:
    @wraps(original)
    def look_up(*args: Any) -> Any:
        if len(args) > 1 and isinstance(args[1], str):
            # `inspect.currentframe` calls `hasattr` itself.
            caller = sys._getframe(1).f_code
            key = id(caller)
            if key not in names_by_caller:
                names_by_caller[key] = caller, set()
            names_by_caller[key][1].add(args[1])
        return original(*args)

    return look_up
