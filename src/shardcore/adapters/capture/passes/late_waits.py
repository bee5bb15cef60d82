"""Waits for collectives when their results are read, and not before."""

import attrs

from shardcore.adapters import torch_compat
from shardcore.adapters.capture.analyses import (
    gathering_ranks,
    is_view,
    live_bytes,
    needs_of,
    sent_bytes,
)
from shardcore.adapters.capture.guards import check
from shardcore.adapters.capture.tape import Call, Tape


@attrs.frozen
class _InFlight:
    """A collective that was started.

    Args:
        waits: The calls that wait for its results.
        held: The bytes that it sends and that only it may hold.
        gathers_over: Of a gather on a CPU, its ranks.
    """

    waits: list[Call]
    held: int
    gathers_over: str


def with_late_waits(tape: Tape) -> Tape:
    """Returns `tape` with each wait before the first call that needs it.

    That reads the result, or overwrites what was sent. A collective holds what it sends until it
    is waited for: where the step would hold more for that than it does at its highest, the oldest
    is waited for. On a CPU a gather is waited for before the next one starts over the same ranks.
    All are waited for where the step may be left: their memory is used again.
    """
    needs, live = needs_of(tape), live_bytes(tape)
    highest = max(live, default=0)
    starts: dict[int, int] = {}  # by the place of a collective, or of a wait for it, its place
    flight: dict[int, _InFlight] = {}  # by the place of the collective, the oldest first
    calls: list[Call] = []
    for place, call in enumerate(tape.calls):
        needed = {starts[each] for each in needs[place] if each in starts}
        if torch_compat.is_wait(call.operator) and needed:
            starts[place] = max(needed)
            continue
        if not is_view(call, tape):  # which reads nothing
            ranks = gathering_ranks(call, tape)
            for each in list(flight):
                is_next = ranks and flight[each].gathers_over == ranks
                if each in needed or is_next or call.operator is check:
                    calls += flight.pop(each).waits
        for each, started in list(flight.items()):
            if sum(other.held for other in flight.values()) <= highest - live[place]:
                break
            if started.held:
                calls += flight.pop(each).waits
        calls.append(call)
        if torch_compat.is_collective(call.operator):
            starts[place] = place
            waits = [Call(torch_compat.wait_for(), (made,), {}, made) for made in call.results]
            ranks = gathering_ranks(call, tape)
            flight[place] = _InFlight(waits, sent_bytes(call, tape), ranks)
    return tape.with_calls([*calls, *(wait for each in flight.values() for wait in each.waits)])
