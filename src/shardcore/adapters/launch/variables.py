"""The variable of a function whose value cannot be sent to another process."""

import builtins
from collections.abc import Callable, Iterator
from types import CodeType, FunctionType
from typing import Any

from shardcore.adapters.launch import payload
from shardcore.domain.errors import EnvironmentProblem


def not_sent(
    call: str, values: dict[str, Any], rules: payload.Rules, error: Exception
) -> EnvironmentProblem:
    """Returns the error of a call whose values cannot be sent.

    Args:
        call: The call, such as "launch()".
        values: Each value by the words for it.
        rules: What may be sent.
        error: The error that the values have raised.
    """
    words = next(_first(values.items(), rules), "a value")
    is_known = isinstance(error, EnvironmentProblem)
    problem = (
        str(error) if is_known else f"what cannot be pickled ({_describe_error(error)}). {_REMEDY}"
    )
    return EnvironmentProblem(
        f"{call} starts new processes and sends them the function and all that it reads, but "
        f"{words} holds {problem}"
    )


_REMEDY = "Make it in the function."


def _describe_error(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


def _first(values: Any, rules: payload.Rules) -> Iterator[str]:
    """Yields the words for the first value that cannot be sent, by the variable that holds it."""
    for words, value in values:
        if not _can_be_sent(value, rules):
            yield _innermost(words, value, rules, {id(value)})
            return


def _innermost(words: str, value: Any, rules: payload.Rules, seen: set[int]) -> str:
    """Returns the words for the variable of a function which holds what cannot be sent."""
    for function in _functions(value):
        for name, held in _variables_of(function):
            if id(held) not in seen and not _can_be_sent(held, rules):
                inner = f"variable {name!r}, which {function.__name__}() reads,"
                return _innermost(inner, held, rules, seen | {id(held)})
    return words


def _functions(value: Any) -> Iterator[FunctionType]:
    """Yields a function itself, that of a method or of a partial call, the methods of a class."""
    for candidate in (value, getattr(value, "func", None), getattr(value, "__func__", None)):
        if isinstance(candidate, FunctionType):
            yield candidate
    kind = value if isinstance(value, type) else type(value)
    if kind.__module__ == "__main__":
        yield from (method for method in vars(kind).values() if isinstance(method, FunctionType))


def _variables_of(function: FunctionType) -> Iterator[tuple[str, Any]]:
    """Yields the variables that a function reads, with their values."""
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            yield name, cell.cell_contents
        except ValueError:  # it is empty: an inner function that is not defined yet
            continue
    for name in dict.fromkeys(_names(function.__code__)):
        if name in function.__globals__ and not hasattr(builtins, name):
            yield name, function.__globals__[name]
    names = function.__code__.co_varnames[: function.__code__.co_argcount]
    defaults = function.__defaults__ or ()
    yield from zip(names[len(names) - len(defaults) :], defaults, strict=True)
    yield from (function.__kwdefaults__ or {}).items()


def _names(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)


def _can_be_sent(value: object, rules: payload.Rules) -> bool:
    try:
        payload.check(value, rules)
    except Exception:  # noqa: BLE001 - whatever the user's value raises
        return False
    return True


def arguments_of(function: Callable[..., object], arguments: tuple[object, ...]) -> dict[str, Any]:
    """Returns the arguments of a call by the words for them: "argument 'epochs'"."""
    code = getattr(function, "__code__", None)
    names = () if code is None else code.co_varnames[: code.co_argcount]
    labels = [repr(name) for name in names] + [str(n) for n in range(len(names), len(arguments))]
    return {f"argument {label}": value for label, value in zip(labels, arguments, strict=False)}
