"""The names in the code of a function: what it looks up in modules and on objects."""

import builtins
import dis
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from itertools import takewhile
from types import CodeType
from typing import Any

import attrs

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
# Functions that ask for an attribute which may not be there.
PROBES = frozenset({"getattr", "hasattr", "vars", "__dict__"})
_IDENTIFIER = re.compile(r"[A-Za-z_]\w*")
# Instructions that load a value by a name or from a constant, and change nothing.
_LOADS = ("LOAD_FAST", "LOAD_DEREF", "LOAD_GLOBAL", "LOAD_ATTR", "LOAD_NAME", "LOAD_CLOSURE")
_VARIABLES = ("LOAD_GLOBAL", "LOAD_NAME")
_IGNORED = frozenset({"PUSH_NULL", "PRECALL", "CACHE", "NOP", "RESUME", "COPY_FREE_VARS"})


@attrs.frozen
class Names:
    """The names in the code of a function, without those of the functions within it.

    Args:
        variables: Names of global variables.
        attributes: Names of attributes and keys: all names, and all strings.
        passed_variables: Those that may be passed on: others are called where they are loaded.
        passed_attributes: Likewise.
        modules: Names of modules that it imports.
        are_complete: Whether all other names are seen while they are looked up: by calls of
            `getattr` and `hasattr`, see `noted_lookups`.
        location: The function and its line, for messages.
    """

    variables: frozenset[str]
    attributes: frozenset[str]
    passed_variables: frozenset[str]
    passed_attributes: frozenset[str]
    modules: frozenset[str]
    are_complete: bool
    location: str

    @classmethod
    def of(cls, code: CodeType) -> "Names":
        """Returns the names in `code`.

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
        return cls(
            frozenset(variables),
            frozenset(attributes),
            frozenset(passed | strings),
            frozenset({step.argval for step in loads if step.opname not in _VARIABLES} | strings),
            frozenset(modules),
            not attributes & _ALL and _are_called(instructions),
            f"{code.co_qualname} ({code.co_filename}:{code.co_firstlineno})",
        )


def _strings(constants: tuple[object, ...]) -> Iterator[str]:
    """Yields the strings among constants, and in tuples and sets of these."""
    for constant in constants:
        if isinstance(constant, str):
            yield constant
            if "{" in constant:  # a format such as "{0.rate}", whose names are attributes
                yield from _IDENTIFIER.findall(constant)
        elif isinstance(constant, tuple | frozenset):
            yield from _strings(tuple(constant))


def _loads_value(step: dis.Instruction) -> bool:
    """Returns whether an instruction loads what a name refers to, not in order to call it."""
    if step.opname in ("LOAD_NAME", "IMPORT_FROM"):
        return True
    is_attribute = step.opname == "LOAD_ATTR"  # Python 3.11 loads by LOAD_METHOD what is called
    is_called = bool((step.arg or 0) & 1) and not (is_attribute and sys.version_info < (3, 12))
    return (is_attribute or step.opname == "LOAD_GLOBAL") and not is_called


def _are_called(instructions: list[dis.Instruction]) -> bool:
    """Returns whether `getattr` and `hasattr` are called where they are loaded, or by a constant.

    Else code may pass them on, and something else looks up.
    """
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
def noted_lookups(names_by_caller: dict[CodeType, set[str]]) -> Iterator[None]:
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


def _noting(
    original: Callable[..., Any], names_by_caller: dict[CodeType, set[str]]
) -> Callable[..., Any]:
    @wraps(original)
    def look_up(*args: Any) -> Any:
        if len(args) > 1 and isinstance(args[1], str):
            # `inspect.currentframe` calls `hasattr` itself.
            caller = sys._getframe(1).f_code
            names_by_caller.setdefault(caller, set()).add(args[1])
        return original(*args)

    return look_up
