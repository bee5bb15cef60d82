"""In what other orders the calls of a tape do the same."""

import attrs

from shardcore.adapters import torch_compat
from shardcore.adapters.capture.tape import Call, Tape, Value


def gathers(call: Call) -> bool:
    """Whether it starts an all-gather."""
    return torch_compat.collective_name(call.operator) == "all_gather"


def gathering_ranks(call: Call, tape: Tape) -> str:
    """The group over which `call` gathers on a CPU, where one gather may be under way; else empty.

    torch 2.13: gathers over gloo have all one tag. Of two at once one receives what was sent for
    the other, which breaks the memory where it is larger.
    """
    on_cpu = gathers(call) and tape.form(call.args[0]).device.type == "cpu"
    return str(call.args[-1]) if on_cpu else ""


def is_view(call: Call, tape: Tape) -> bool:
    """Whether `call` only tells how to look at a memory, and neither reads nor writes it."""
    made = {tape.memory[value.number] for value in call.results}
    if call.writes or not made or torch_compat.is_wait(call.operator):
        return False
    return made <= tape.reads_of(call)


def needs_of(tape: Tape) -> list[set[int]]:
    """By place, the places of the calls that must come before the call there."""
    found = _Found()
    return [found.needs(call, place, tape) for place, call in enumerate(tape.calls)]


@attrs.define
class _Found:
    """What the calls so far have done.

    Args:
        made: By value, where it was made.
        written: By memory, where it was written last.
        read: By memory, where it was read since.
        drawn: Where a random generator was last moved.
    """

    made: dict[Value, int] = attrs.field(factory=dict)
    written: dict[int, int] = attrs.field(factory=dict)
    read: dict[int, set[int]] = attrs.field(factory=dict)
    drawn: int | None = None

    def needs(self, call: Call, place: int, tape: Tape) -> set[int]:
        """What `call`, the next one, must come after."""
        found = {self.made[value] for value in call.operands if value in self.made}
        if not is_view(call, tape):
            found |= self._of_memories(tape.reads_of(call), tape.writes_of(call), place)
        if torch_compat.draws(call.operator):
            found |= set() if self.drawn is None else {self.drawn}
            self.drawn = place
        for value in call.results:
            self.made.setdefault(value, place)
        return found - {place}

    def _of_memories(self, read: set[int], written: set[int], place: int) -> set[int]:
        found = {self.written[memory] for memory in read | written if memory in self.written}
        for memory in written:
            found |= self.read.pop(memory, set())
            self.written[memory] = place
        for memory in read - written:
            self.read.setdefault(memory, set()).add(place)
        return found
