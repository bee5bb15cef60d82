"""Starts collectives early and waits for them late: the step computes meanwhile."""

import attrs

from shardcore.adapters import torch_private
from shardcore.adapters.capture.passes.checks import check
from shardcore.adapters.capture.trace.analyses import (
    FAR,
    gathering_ranks,
    gathers,
    held_bytes,
    is_view,
    live_bytes,
    needs_of,
    sent_bytes,
    with_needs,
)
from shardcore.adapters.capture.trace.trace import Call, Trace


def with_early_starts(trace: Trace, far: int = FAR) -> Trace:
    """Returns `trace` with each collective started as soon as its operand is computed.

    It prefetches: a weight is all-gathered while the layer before it computes, and the gradient of
    an input is reduced while that of the kernel is computed. Collectives keep their order, which is
    the same on all ranks. A start moves no further than the peak memory of the step allows. On
    gloo, no all-gather overtakes the first reader of the all-gather before it over the same ranks.
    A start overtakes at most `far` calls.
    """
    needs = needs_of(trace)
    order: dict[int, None] = {}  # the indices of calls, each where it comes first
    live = live_bytes(trace)
    highest = max(live, default=0)
    readers = _first_readers(trace)
    gathered: dict[str, int] = {}
    last = ordered = 0
    for index, call in enumerate(trace.calls):
        if not _is_fixed(call, trace):
            continue
        first, held = index, held_bytes(call, trace)
        ranks = gathering_ranks(call, trace)
        farthest = max(index - far, gathered.get(ranks, 0) if gathers(call) else last)
        while first > farthest and live[first - 1] + held <= highest:
            first -= 1
            live[first] += held
        order |= dict.fromkeys(range(ordered, first))
        ordered = max(ordered, first)
        order |= dict.fromkeys(with_needs([index], needs, order))
        last = last if gathers(call) else index
        if ranks:
            gathered[ranks] = readers.get(trace.memory[call.result.number], index)
    order |= dict.fromkeys(range(len(trace.calls)))
    return trace.with_calls(trace.calls[index] for index in order)


def _first_readers(trace: Trace) -> dict[int, int]:
    """Returns, by memory, the index of the first call that reads it; a view does not."""
    readers: dict[int, int] = {}
    for index, call in enumerate(trace.calls):
        if not is_view(call, trace):
            for memory in trace.reads_of(call):
                readers.setdefault(memory, index)
    return readers


def _is_fixed(call: Call, trace: Trace) -> bool:
    """Returns whether all ranks run `call` in one order: a collective, or an effect on the host."""
    operator = call.operator
    return torch_private.is_of_collectives(operator) or not trace.writes_of(call)


@attrs.frozen
class _InFlight:
    """A collective that has started and not finished.

    Args:
        waits: The calls that wait for its results.
        held: The bytes of operands that only it keeps in memory.
        gathers_over: The ranks of an all-gather of gloo; empty for any other.
    """

    waits: list[Call]
    held: int
    gathers_over: str


def with_late_waits(trace: Trace) -> Trace:
    """Returns `trace` with a wait for each collective, before the first call that needs it.

    Such a call reads the result, or overwrites the operand. A collective holds its operand until
    the wait: if that would exceed the peak memory of the step, the oldest one is waited for. On
    gloo, an all-gather is waited for before the next one over the same ranks starts. A check, where
    the step may end, waits for all: their memory is used again.
    """
    needs, live = needs_of(trace), live_bytes(trace)
    highest = max(live, default=0)
    flight: dict[int, _InFlight] = {}  # by the index of the collective, the oldest first
    calls: list[Call] = []
    for index, call in enumerate(trace.calls):
        if not is_view(call, trace):  # a view reads nothing
            ranks = gathering_ranks(call, trace)
            for start in list(flight):
                is_next = ranks and flight[start].gathers_over == ranks
                if start in needs[index] or is_next or call.operator is check:
                    calls += flight.pop(start).waits
        for start, started in list(flight.items()):
            if sum(other.held for other in flight.values()) <= highest - live[index]:
                break
            if started.held:
                calls += flight.pop(start).waits
        calls.append(call)
        if call.collective:
            waits = [Call(torch_private.wait_for(), (made,), {}, made) for made in call.results]
            ranks = gathering_ranks(call, trace)
            flight[index] = _InFlight(waits, sent_bytes(call, trace), ranks)
    return trace.with_calls(
        [*calls, *(wait for in_flight in flight.values() for wait in in_flight.waits)]
    )
