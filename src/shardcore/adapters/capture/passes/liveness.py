"""What a step holds while it runs."""

from itertools import accumulate

from shardcore.adapters import torch_compat
from shardcore.adapters.capture.tape import Call, Tape, values


def live_bytes(tape: Tape) -> list[int]:
    """By place, the bytes that are held while the call there runs.

    Counted is what the calls have made. It is held until its last use, and what a collective sends
    until that is waited for. What was there before is not counted.
    """
    changes = [0] * (len(tape.calls) + 2)
    for memory, (first, last) in _lives(tape).items():
        form = tape.forms[memory]
        changes[first] += 0 if form is None else form.bytes
        changes[last + 1] -= 0 if form is None else form.bytes
    return list(accumulate(changes))[: len(tape.calls)]


def last_uses(tape: Tape, *, sends: bool = False) -> dict[int, int]:
    """By memory that the calls make, the place of its last use; of outputs, after all calls.

    Args:
        tape: A step.
        sends: Whether what is under way to other ranks is in use.
    """
    return {memory: last for memory, (_, last) in _lives(tape, sends=sends).items()}


def _lives(tape: Tape, *, sends: bool = True) -> dict[int, tuple[int, int]]:
    """By memory, the places of its first and its last use; to be sent is one, if `sends`."""
    theirs = _there_before(tape)
    found: dict[int, tuple[int, int]] = {}
    sent: dict[int, set[int]] = {}
    for place, call in enumerate(tape.calls):
        used = tape.reads_of(call) | tape.writes_of(call)
        if torch_compat.is_collective(call.operator):
            sent |= dict.fromkeys(tape.writes_of(call), tape.reads_of(call))
        if sends and torch_compat.is_wait(call.operator):
            used |= {memory for each in used for memory in sent.get(each, ())}
        found |= {memory: (found.get(memory, (place,))[0], place) for memory in used - theirs}
    for value in values(tape.outputs):
        memory = tape.memory[value.number]
        if memory in found:
            found[memory] = found[memory][0], len(tape.calls)
    return found


def held_bytes(call: Call, tape: Tape) -> int:
    """The bytes that a collective holds: of what it sends, and what it makes."""
    forms = (tape.forms[value.number] for value in {*call.operands, *call.results})
    return sum(form.bytes for form in forms if form is not None)


def sent_bytes(call: Call, tape: Tape) -> int:
    """The bytes of what a collective sends, but for what is there before it and after."""
    memories = tape.reads_of(call) - tape.writes_of(call) - _there_before(tape)
    forms = (tape.forms[memory] for memory in memories)
    return sum(form.bytes for form in forms if form is not None)


def _there_before(tape: Tape) -> set[int]:
    inputs = {tape.memory[value.number] for value in tape.inputs}
    return inputs | {tape.memory[number] for number in tape.outside}
