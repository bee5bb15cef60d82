"""All-gathers in the backward pass and into memory that the step makes; starts before waits."""

from bisect import bisect

import attrs
import torch

from shardcore.adapters import torch_private
from shardcore.adapters.capture import analyses
from shardcore.adapters.capture.passes.checks import check
from shardcore.adapters.capture.trace import Call, Trace, Value
from shardcore.adapters.torch_private import collectives

_FEW = 4  # all-reduces between the outputs of a model and the gradient of its last layer
_EMPTY = torch.ops.aten.empty.memory_format


def with_regathers(trace: Trace) -> Trace:
    """Adds a second all-gather of each weight that the backward pass reads.

    The full weight is freed in between, as FSDP's `reshard_after_forward` does. A weight that the
    backward pass reads before another all-gather is kept.
    """
    new_trace = trace.with_calls([])
    makers = analyses.makers_of(trace)
    needs = [{makers[value] for value in call.operands if value in makers} for call in trace.calls]
    indices = [index for index, call in enumerate(trace.calls) if analyses.gathers(call)]
    calls = list(trace.calls)
    again: dict[int, list[Call]] = {}
    for index in indices:
        if calls[index].backward:
            continue
        made, last_use, readers = _uses(index, trace)
        if not readers or bisect(indices, last_use) == bisect(indices, readers[0]):
            continue  # no other weight is all-gathered between the two
        read = {value for reader in readers for value in trace.calls[reader].operands} & made
        made_by = analyses.with_needs({makers[value] for value in read}, needs)
        if _may_repeat(made_by, readers[0], trace):
            names: dict[Value, Value] = {}
            for call in analyses.repeat_calls(
                (trace.calls[maker] for maker in made_by), names, new_trace
            ):
                again.setdefault(readers[0], []).append(attrs.evolve(call, backward=True))
            for reader in readers:
                args, kwargs = analyses.rename_values(
                    (calls[reader].args, calls[reader].kwargs), names
                )
                calls[reader] = attrs.evolve(calls[reader], args=args, kwargs=kwargs)
    new_trace.calls = [
        scheduled for index, call in enumerate(calls) for scheduled in (*again.get(index, ()), call)
    ]
    return new_trace


def _uses(gather: int, trace: Trace) -> tuple[set[Value], int, list[int]]:
    """Follows the weight that the call at index `gather` all-gathers.

    Returns:
        The weight and its copies and views; the index of the last call that reads it before the
        backward pass; and the indices of its readers in that pass.
    """
    made = set(trace.calls[gather].results)
    readers, last_use = [], gather
    for index in range(gather + 1, len(trace.calls)):
        call = trace.calls[index]
        if made.isdisjoint(call.operands):
            continue
        if call.backward:
            readers.append(index)
        elif made.issuperset(call.operands) and _only_moves(call):
            made |= set(call.results)
        else:
            last_use = index
    return made, last_use, readers


def _may_repeat(indices: list[int], reader: int, trace: Trace) -> bool:
    """Checks that the calls only move data, which nothing changes before index `reader`."""
    calls = [trace.calls[index] for index in indices]
    touched = set[int]().union(*map(trace.reads_of, calls), *map(trace.writes_of, calls))
    between = trace.calls[indices[0] : reader]
    written = (value for call in between for value in call.writes)
    moves = all(_only_moves(call) or analyses.gathers(call) for call in calls)
    return moves and not touched & trace.memories((*written, *trace.inputs))


def _only_moves(call: Call) -> bool:
    operator = call.operator
    return operator in _MOVES or getattr(operator, "is_view", False)


_MOVES = {
    torch_private.TO_COPY,
    torch.ops.aten.cat.default,
    torch.ops.aten.chunk.default,
    torch.ops.aten.clone.default,
    torch.ops.aten.constant_pad_nd.default,
    torch.ops.aten.contiguous.default,
    torch.ops.aten.pad.default,
    torch.ops.aten.reshape.default,
    torch.ops.aten.split.Tensor,
    torch.ops.aten.split_with_sizes.default,
}


def with_early_gather_of_head(trace: Trace) -> Trace:
    """Starts the first all-gather of the backward pass before the few all-reduces in front of it.

    They reduce what depends on the outputs: the loss, the gradient of a bias. The all-gather is
    the second one of a fully sharded head, whose outputs run in slices only where no collective is
    between the calls that read them. All ranks do it alike, also one with too few rows to slice.
    """
    calls = trace.calls
    sends = [index for index, call in enumerate(calls) if call.collective]
    gather = next((at for at in sends if analyses.gathers(calls[at]) and calls[at].backward), None)
    if gather is None:
        return trace
    before, begin = sends[: sends.index(gather)][-_FEW:], gather
    for index in reversed(before):
        if not calls[index].is_all_reduce:
            break
        begin = index
    needs = analyses.with_needs([gather], analyses.needs_of(trace))
    moved = [index for index in needs if index >= begin]
    if not set(moved).isdisjoint(before):
        return trace
    rest = (index for index in range(begin, len(calls)) if index not in moved)
    return trace.with_calls(calls[index] for index in (*range(begin), *moved, *rest))


def with_memory_for_gathers(trace: Trace) -> Trace:
    """Lets all-gathers on a CPU write into memory that the step allocates.

    Such a gather is safe on gloo where several are under way (`collectives.gather_safely`), and
    here it runs no Python.
    """

    def rewrite(call: Call, new_trace: Trace) -> Call:
        if call.operator is not collectives.gather():
            return call
        form = new_trace.form(call.result)
        if form.device.type != "cpu" or form.dtype.is_complex:
            return call
        kwargs = {"dtype": form.dtype, "device": form.device}
        new_trace.calls.append(Call(_EMPTY, ([*form.shape],), kwargs, call.result, (), call.line))
        into = call.kwargs | {"out": call.result}
        operator = collectives.gather_into()
        return attrs.evolve(call, operator=operator, kwargs=into, writes=(call.result,))

    return analyses.rewrite_calls(trace, rewrite)


def with_early_starts(trace: Trace, far: int = analyses.FAR) -> Trace:
    """Starts each collective as soon as its operand is computed.

    It prefetches: a weight is all-gathered while the layer before it computes, and the gradient of
    an input is reduced while that of the kernel is computed. Collectives keep their order, which is
    the same on all ranks. A start moves no further than the peak memory of the step allows. On
    gloo, no all-gather overtakes the first reader of the all-gather before it over the same ranks.
    A start overtakes at most `far` calls.
    """
    needs = analyses.needs_of(trace)
    order: dict[int, None] = {}  # the indices of calls, each where it comes first
    live = analyses.live_bytes(trace)
    highest = max(live, default=0)
    readers = _first_readers(trace)
    gathered: dict[str, int] = {}
    last = ordered = 0
    for index, call in enumerate(trace.calls):
        if not _is_fixed(call, trace):
            continue
        first, held = index, analyses.held_bytes(call, trace)
        ranks = analyses.gathering_ranks(call, trace)
        farthest = max(index - far, gathered.get(ranks, 0) if analyses.gathers(call) else last)
        while first > farthest and live[first - 1] + held <= highest:
            first -= 1
            live[first] += held
        order |= dict.fromkeys(range(ordered, first))
        ordered = max(ordered, first)
        order |= dict.fromkeys(analyses.with_needs([index], needs, order))
        last = last if analyses.gathers(call) else index
        if ranks:
            gathered[ranks] = readers.get(trace.memory[call.result.number], index)
    order |= dict.fromkeys(range(len(trace.calls)))
    return trace.with_calls(trace.calls[index] for index in order)


def _first_readers(trace: Trace) -> dict[int, int]:
    """Finds, by memory, the index of the first call that reads it; a view does not."""
    readers: dict[int, int] = {}
    for index, call in enumerate(trace.calls):
        if not analyses.is_view(call, trace):
            for memory in trace.reads_of(call):
                readers.setdefault(memory, index)
    return readers


def _is_fixed(call: Call, trace: Trace) -> bool:
    """Finds the calls that all ranks run in one order: collectives, and effects on the host."""
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
    """Waits for each collective before the first call that needs it.

    Such a call reads the result, or overwrites the operand. A collective holds its operand until
    the wait: if that would exceed the peak memory of the step, the oldest one is waited for. On
    gloo, an all-gather is waited for before the next one over the same ranks starts. A check, where
    the step may end, waits for all: their memory is used again.
    """
    needs, live = analyses.needs_of(trace), analyses.live_bytes(trace)
    highest = max(live, default=0)
    flight: dict[int, _InFlight] = {}  # by the index of the collective, the oldest first
    calls: list[Call] = []
    for index, call in enumerate(trace.calls):
        if not analyses.is_view(call, trace):  # a view reads nothing
            ranks = analyses.gathering_ranks(call, trace)
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
            ranks = analyses.gathering_ranks(call, trace)
            flight[index] = _InFlight(waits, analyses.sent_bytes(call, trace), ranks)
    return trace.with_calls(
        [*calls, *(wait for in_flight in flight.values() for wait in in_flight.waits)]
    )
