"""The names in the code of a function: what it looks up in modules and on objects."""

import dis
import re
from collections.abc import Iterator
from itertools import takewhile
from types import CodeType

import attrs

# Functions that look up attributes by a name that they are given.
_LOOKUPS = frozenset({"getattr", "hasattr"})
# Names of what reads all attributes of an object, or those whose names are in a value.
_ALL = frozenset(
    {
        *("vars", "dir", "__dict__", "__getattribute__", "attrgetter", "methodcaller"),
        *("copy", "deepcopy", "asdict", "astuple", "fields", "evolve", "getattr_static"),
    }
)
_IDENTIFIER = re.compile(r"[A-Za-z_]\w*")
# Instructions that load a value by a name or from a constant, and change nothing.
_LOADS = ("LOAD_FAST", "LOAD_DEREF", "LOAD_GLOBAL", "LOAD_ATTR", "LOAD_NAME", "LOAD_CLOSURE")
_IGNORED = frozenset({"PUSH_NULL", "PRECALL", "CACHE", "NOP", "RESUME", "COPY_FREE_VARS"})


@attrs.frozen
class Names:
    """The names in the code of a function, without those of the functions within it.

    Args:
        variables: Names of global variables.
        attributes: Names of attributes and keys: all names, and all strings.
        modules: Names of modules that it imports.
        are_complete: Whether no attribute is looked up by another name.
        location: The function and its line, for messages.
    """

    variables: frozenset[str]
    attributes: frozenset[str]
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
            instruction.argval
            for instruction in instructions
            if instruction.opname in ("LOAD_GLOBAL", "LOAD_NAME")
        ]
        modules = [step.argval for step in instructions if step.opname == "IMPORT_NAME"]
        attributes = {*code.co_names, *_strings(code.co_consts)}
        if any(instruction.opname == "MATCH_CLASS" for instruction in instructions):
            attributes.add("__match_args__")
        return cls(
            frozenset(variables),
            frozenset(attributes),
            frozenset(modules),
            not attributes & _ALL and _are_constant(instructions),
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


def _are_constant(instructions: list[dis.Instruction]) -> bool:
    """Returns whether each `getattr` and `hasattr` is called with a name that is a constant.

    What is more than loads of an object, a constant string, at most a default, and the call is not.
    """
    steps = [step for step in instructions if step.opname not in _IGNORED]
    return all(
        _names_a_constant(steps[index + 1 :])
        for index, step in enumerate(steps)
        if step.argval in _LOOKUPS and step.opname != "LOAD_CONST"
    )


def _names_a_constant(steps: list[dis.Instruction]) -> bool:
    loads = list(takewhile(lambda step: step.opname.startswith(_LOADS), steps))
    name, *after = steps[len(loads) : len(loads) + 3]
    has_default = not after[0].opname.startswith("CALL") and after[0].opname.startswith("LOAD")
    call = after[-1] if has_default else after[0]
    is_text = name.opname == "LOAD_CONST" and isinstance(name.argval, str)
    return bool(loads) and is_text and call.opname.startswith("CALL")
