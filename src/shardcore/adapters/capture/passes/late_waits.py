"""Collectives are waited for when somebody reads what they make, and not before."""

import attrs

from shardcore.adapters import torch_compat
from shardcore.adapters.capture.passes.liveness import live_bytes, sent_bytes
from shardcore.adapters.capture.passes.order import gathering_ranks, is_view
from shardcore.adapters.capture.tape import Call, Tape


def with_late_waits(tape: Tape) -> Tape:
    """Each wait stands before the first call that reads what it waits for, or writes what was sent.

    A collective holds what it sends until it is waited for. Where the step would hold more for
    that than it does at its highest, the oldest is waited for. On a CPU a gather is waited for
    before the next one starts over the same ranks.
    """
    flight = _Flight(tape)
    live = live_bytes(tape)
    highest = max(live, default=0)
    calls: list[Call] = []
    for place, call in enumerate(tape.calls):
        if torch_compat.is_wait(call.operator) and tape.reads_of(call) <= flight.sent.keys():
            continue
        calls += flight.due(call)
        calls += flight.oldest(highest - live[place])
        calls.append(call)
        if torch_compat.is_collective(call.operator):
            flight.begin(call)
    return tape.with_calls([*calls, *flight.waits.values()])


@attrs.define
class _Flight:
    """Collectives that are under way.

    Args:
        tape: The step.
        waits: What waits for each, by the memory that it makes, in the order of their starts.
        sent: By the same, of all that were started, what they read.
        held: By the same, the bytes of that which only they may hold.
        gathered: By the same, of gathers on a CPU, over which ranks.
    """

    tape: Tape
    waits: dict[int, Call] = attrs.field(factory=dict)
    sent: dict[int, set[int]] = attrs.field(factory=dict)
    held: dict[int, int] = attrs.field(factory=dict)
    gathered: dict[int, str] = attrs.field(factory=dict)

    def due(self, call: Call) -> list[Call]:
        """The waits that `call` is to come after. A view is no reading."""
        if is_view(call, self.tape):
            return []
        written = self.tape.writes_of(call)
        touched = self.tape.reads_of(call) | written
        ranks = gathering_ranks(call, self.tape)
        found = [
            memory
            for memory in self.waits
            if memory in touched
            or self.sent[memory] & written
            or (ranks and self.gathered.get(memory) == ranks)
        ]
        return [self._ended(memory) for memory in found]

    def oldest(self, room: int) -> list[Call]:
        """The waits for the oldest, so many that the others hold no more than `room` bytes."""
        found = []
        for memory, held in list(self.held.items()):
            if sum(self.held.values()) <= room:
                break
            if held:
                found.append(self._ended(memory))
        return found

    def begin(self, call: Call) -> None:
        """`call` starts a collective."""
        for made in call.results:
            memory = self.tape.memory[made.number]
            self.waits[memory] = Call(torch_compat.wait_for(), (made,), {}, made)
            self.sent[memory] = self.tape.reads_of(call)
            self.held[memory] = sent_bytes(call, self.tape)
            self.gathered[memory] = gathering_ranks(call, self.tape)

    def _ended(self, memory: int) -> Call:
        del self.held[memory]
        return self.waits.pop(memory)
