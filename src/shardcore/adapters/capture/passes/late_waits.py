"""Collectives are waited for when somebody reads what they make, and not before."""

from shardcore.adapters import torch_compat
from shardcore.adapters.capture.tape import Call, Tape, Value


def with_late_waits(tape: Tape) -> Tape:
    """Each wait stands before the first call that touches what it waits for, or was sent."""
    calls: list[Call] = []
    waiting: dict[int, Call] = {}  # by the memory that a collective makes
    sent: dict[int, set[int]] = {}  # by the same, what it may still be reading
    for call in tape.calls:
        if torch_compat.is_wait(call.operator):
            waiting[_memory(tape, call)] = call
            continue
        touched = tape.reads_of(call) | tape.writes_of(call)
        written = tape.writes_of(call)
        due = [m for m in waiting if m in touched or sent.get(m, set()) & written]
        calls += [waiting.pop(memory) for memory in due]
        calls.append(call)
        if torch_compat.is_collective(call.operator):
            for memory in tape.writes_of(call):
                sent[memory] = tape.reads_of(call)
    return tape.with_calls([*calls, *waiting.values()])


def _memory(tape: Tape, wait: Call) -> int:
    value = wait.args[0]
    assert isinstance(value, Value)
    return tape.memory[value.number]
