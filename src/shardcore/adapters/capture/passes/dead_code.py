"""Calls whose results nobody reads."""

from shardcore.adapters import torch_compat
from shardcore.adapters.capture.tape import Call, Tape, values


def without_dead_code(tape: Tape) -> Tape:
    """Only calls that an output, a tensor outside, another rank or a later draw hangs on."""
    outputs = {tape.memory[value.number] for value in values(tape.outputs)}
    outside = {tape.memory[number] for number in tape.outside}
    inputs = {tape.memory[value.number] for value in tape.inputs}
    live = outputs | outside | inputs
    kept = []
    for call in reversed(tape.calls):
        if _has_effect(call) or tape.writes_of(call) & live:
            kept.append(call)
            live |= tape.reads_of(call) | tape.writes_of(call)
    return tape.with_calls(reversed(kept))


def _has_effect(call: Call) -> bool:
    return torch_compat.draws(call.operator) or torch_compat.is_of_collectives(call.operator)
