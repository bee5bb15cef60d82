"""Calls whose results nobody reads."""

from shardcore.adapters import torch_compat
from shardcore.adapters.capture.guards import check
from shardcore.adapters.capture.tape import Call, Tape, values


def without_dead_code(tape: Tape) -> Tape:
    """Only calls that an output, a tensor outside, another rank or a later draw hangs on."""
    read = set(values(tape.outputs))
    live = {tape.memory[value.number] for value in (*read, *tape.inputs)}
    live |= {tape.memory[number] for number in tape.outside}
    kept = []
    for call in reversed(tape.calls):
        # What writes is there for all that lies in the memory; what does not, for its results.
        is_read = tape.writes_of(call) & live if call.writes else read & set(call.results)
        if is_read or _has_effect(call):
            kept.append(call)
            live |= tape.reads_of(call) | tape.writes_of(call)
            read |= set(call.operands)
    return tape.with_calls(reversed(kept))


def _has_effect(call: Call) -> bool:
    operator = call.operator
    draws, sends = torch_compat.draws(operator), torch_compat.is_of_collectives(operator)
    return draws or sends or operator is check
