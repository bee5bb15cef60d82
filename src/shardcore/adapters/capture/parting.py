"""A tape in two: what no compiler takes, with all that it hangs on, runs ahead of the rest."""

from collections.abc import Set
from types import FunctionType

from shardcore.adapters import torch_compat
from shardcore.adapters.capture.tape import Call, Tape, Value, values
from shardcore.domain.capture import NotCaptured


def parted(tape: Tape, literals: Set[int]) -> tuple[Tape, Tape]:
    """The calls of Python functions and those with a random generator, and the other calls.

    A function makes a generator of its seed, or looks at a number. Drawn numbers hang on
    shapes and seeds alone, as a rule, so little else is ahead.

    Args:
        tape: A step.
        literals: The numbers of the constants among what is outside.

    Returns:
        The first part, which gives what the second takes as its last inputs.

    Raises:
        NotCaptured: If both parts would write into views of one memory.
    """
    places = _ahead(tape)
    ahead = tape.with_calls(call for n, call in enumerate(tape.calls) if n in places)
    rest = tape.with_calls(call for n, call in enumerate(tape.calls) if n not in places)
    made = {value for call in ahead.calls for value in call.results}
    used = {value for call in rest.calls for value in call.operands} | set(values(tape.outputs))
    known = {*tape.inputs, *(Value(n) for n in tape.outside if n not in literals)}
    given = sorted((made & used) - known, key=lambda value: value.number)
    memories = {tape.memory[value.number] for value in (*tape.inputs, *map(Value, tape.outside))}
    if any(tape.memory[value.number] in memories for value in given):
        raise NotCaptured("a view of what is outside is made for a random draw, and read elsewhere")
    ahead.outputs, rest.inputs = tuple(given), [*tape.inputs, *given]
    return ahead, rest


# Stands for torch's own generator among the memories: its draws keep their order.
_GENERATOR = -1


def _ahead(tape: Tape) -> set[int]:
    """The places of the calls that no compiler takes, and of what must come before them."""
    places: set[int] = set()
    read: set[int] = set()
    written: set[int] = set()
    for place in range(len(tape.calls) - 1, -1, -1):
        call = tape.calls[place]
        reads, writes = tape.reads_of(call), tape.writes_of(call)
        if torch_compat.draws(call.operator) and not _has_generator(tape, call):
            writes.add(_GENERATOR)
        is_needed = writes & (read | written) or reads & written
        if is_needed or isinstance(call.operator, FunctionType) or _has_generator(tape, call):
            places.add(place)
            read |= reads
            written |= writes
    return places


def _has_generator(tape: Tape, call: Call) -> bool:
    return any(tape.forms[value.number] is None for value in (*call.operands, *call.results))
