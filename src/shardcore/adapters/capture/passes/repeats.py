"""Calls that were made before, with the same operands."""

from typing import Any

import attrs

from shardcore.adapters import torch_compat
from shardcore.adapters.capture.tape import Call, Tape, Value, renamed, values


def without_repeats(tape: Tape) -> Tape:
    """The first of several calls that give the same, where nobody writes into what they touch."""
    written = {tape.memory[value.number] for call in tape.calls for value in call.writes}
    names: dict[Value, Value] = {}
    made: dict[str, Any] = {}
    calls = []
    for each in tape.calls:
        call = _renamed(each, names)
        if not _is_pure(call) or (tape.reads_of(call) | tape.writes_of(call)) & written:
            calls.append(call)
            continue
        key = f"{call.operator} {call.args} {sorted(call.kwargs.items())}"
        if key in made:
            pairs = zip(values(call.result), values(made[key]), strict=True)
            names.update((value, names.get(before, before)) for value, before in pairs)
        else:
            made[key] = call.result
            calls.append(call)
    found = tape.with_calls(calls)
    found.outputs = renamed(tape.outputs, names)
    return found


def _renamed(call: Call, names: dict[Value, Value]) -> Call:
    args, kwargs = renamed((call.args, call.kwargs), names)
    return attrs.evolve(call, args=args, kwargs=kwargs, writes=renamed(call.writes, names))


def _is_pure(call: Call) -> bool:
    return not (
        call.writes
        or torch_compat.draws(call.operator)
        or torch_compat.is_of_collectives(call.operator)
        or not list(call.operands)  # a factory: another one may be written into by its reader
    )
