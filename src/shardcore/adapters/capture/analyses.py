"""Dependencies between the calls of a step, its memory, and the replacement of calls."""

from collections.abc import Callable, Container, Iterable, Mapping
from itertools import accumulate
from typing import Any

import attrs

from shardcore.adapters import torch_private
from shardcore.adapters.capture.trace import Call, Number, Trace, Value, numbered, values
from shardcore.domain.cost.events import Allocation, Kind

# A call moves over no more calls than a layer has: its operands are kept for a little longer.
FAR = 64


def gathers(call: Call) -> bool:
    """Tells an all-gather, also one into given memory, from other calls."""
    return call.collective == "all_gather"


def gathering_ranks(call: Call, trace: Trace) -> str:
    """Names the group over which `call` all-gathers by gloo; empty for any other call.

    One all-gather over a group of gloo runs at a time. torch 2.13: all-gathers over gloo share a
    tag. Of two at once, one receives the data of the other and may write past its memory.
    """
    if not gathers(call):
        return ""
    group, device = str(call.args[-1]), trace.form(call.args[0]).device
    return group if torch_private.runs_on_gloo(group, device) else ""


def is_view(call: Call, trace: Trace) -> bool:
    """Finds the calls that neither read nor write memory: their results are views."""
    made = trace.memories(call.results)
    if call.writes or not made or call.is_wait:
        return False
    return made <= trace.reads_of(call)


def needs_of(trace: Trace) -> list[set[int]]:
    """Lists, by index, the indices of the calls that must come before the call there."""
    made: dict[Value, int] = {}
    written: dict[int, int] = {}  # by memory, where it was written last
    read: dict[int, set[int]] = {}  # by memory, where it was read since
    drawn: dict[Value | None, int] = {}  # by random generator; by None, torch's own
    all_needs = []
    for index, call in enumerate(trace.calls):
        needs = {made[value] for value in call.operands if value in made}
        if not is_view(call, trace):
            reads, writes = trace.reads_of(call), trace.writes_of(call)
            needs |= {written[memory] for memory in reads | writes if memory in written}
            for memory in writes:
                needs |= read.pop(memory, set())
                written[memory] = index
            for memory in reads - writes:
                read.setdefault(memory, set()).add(index)
        if call.draws:
            generator = next((v for v in call.operands if trace.forms[v.number] is None), None)
            needs.add(drawn.get(generator, index))
            drawn[generator] = index
        for value in call.results:
            made.setdefault(value, index)
        all_needs.append(needs - {index})
    return all_needs


def makers_of(trace: Trace) -> dict[Value, int]:
    """Finds, by value, the index of the call that makes it."""
    makers: dict[Value, int] = {}
    for index, call in enumerate(trace.calls):
        for value in call.results:
            if value not in call.writes:
                makers.setdefault(value, index)
    return makers


def with_needs(
    indices: Iterable[int], needs: list[set[int]], done: Container[int] = ()
) -> list[int]:
    """Adds the indices of all calls that must come before `indices`, without `done`."""
    open_ = list(indices)
    closure = set(open_)
    while open_:
        new = {index for index in needs[open_.pop()] if index not in done} - closure
        closure |= new
        open_ += new
    return sorted(closure)


def live_bytes(trace: Trace) -> list[int]:
    """Counts, by index, the bytes that are held while the call there runs.

    It counts the results of calls. Each is held until its last use, and the operand of a collective
    until the wait for it. Tensors from outside the step are not counted.
    """
    changes = [0] * (len(trace.calls) + 2)
    for memory, (first, last) in _lives(trace).items():
        size = _bytes([memory], trace)
        changes[first] += size
        changes[last + 1] -= size
    return list(accumulate(changes))[: len(trace.calls)]


def last_uses(trace: Trace, *, sends: bool = False) -> dict[int, int]:
    """Finds, by memory that the calls make, the index of its last use; of outputs, the end.

    If `sends`, the operand of a collective is in use until the wait for it.
    """
    return {memory: last for memory, (_, last) in _lives(trace, sends=sends).items()}


def _lives(trace: Trace, *, sends: bool = True) -> dict[int, tuple[int, int]]:
    """Finds, by memory, the indices of its first and last use, in flight if `sends`."""
    theirs = trace.given() | trace.memories(map(numbered, trace.buffers))
    lives: dict[int, tuple[int, int]] = {}
    sent: dict[int, set[int]] = {}
    for index, call in enumerate(trace.calls):
        used = trace.reads_of(call) | trace.writes_of(call)
        if call.collective:
            sent |= dict.fromkeys(trace.writes_of(call), trace.reads_of(call))
        if sends and call.is_wait:
            used |= {memory for written in used for memory in sent.get(written, ())}
        lives |= {memory: (lives.get(memory, (index,))[0], index) for memory in used - theirs}
    for memory in lives.keys() & trace.memories(values(trace.outputs)):
        lives[memory] = lives[memory][0], len(trace.calls)
    return lives


def held_bytes(call: Call, trace: Trace) -> int:
    """Counts the bytes of the operands and results of a collective, without buffers."""
    numbers = {value.number for value in (*call.operands, *call.results)}
    return _bytes(numbers - trace.buffers.keys(), trace)


def sent_bytes(call: Call, trace: Trace) -> int:
    """Counts the bytes of the operands that a collective alone keeps in memory."""
    return _bytes(trace.reads_of(call) - trace.writes_of(call) - trace.given(), trace)


def allocations_of(trace: Trace, gradients: Iterable[Value]) -> list[Allocation]:
    """Lists the memory that a run of the step takes; the time is the index of a call.

    Args:
        trace: A step.
        gradients: Its values that are gradients of variables.
    """
    kinds: dict[int, Kind] = {}
    for call in trace.calls:
        if call.collective:
            kinds |= dict.fromkeys(trace.memories(call.results), "collectives")
    kinds |= dict.fromkeys(trace.memories(gradients), "gradients")
    kept = {
        torch_private.memory_of(buffer): Allocation(
            kinds.get(trace.memory[number], "collectives"), buffer.untyped_storage().nbytes(), 0
        )
        for number, buffer in trace.buffers.items()
    }
    return [
        *kept.values(),
        *(
            Allocation(kinds.get(memory, "activations"), _bytes([memory], trace), first, last + 1)
            for memory, (first, last) in _lives(trace).items()
        ),
    ]


def _bytes(numbers: Iterable[int], trace: Trace) -> int:
    forms = (trace.forms[number] for number in numbers)
    return sum(form.bytes for form in forms if form is not None)


def rename_values(nest: Any, names: Mapping[Value, Value]) -> Any:
    """Replaces values as `names` says, also those of numbers."""

    def name(leaf: Any) -> Any:
        if isinstance(leaf, Number):
            return Number(names.get(leaf.value, leaf.value))
        return names.get(leaf, leaf) if isinstance(leaf, Value) else leaf

    return torch_private.tree_map(name, nest)


def rewrite_calls(trace: Trace, rewrite: Callable[[Call, Trace], Call | Value]) -> Trace:
    """Replaces each call by what `rewrite` returns for it.

    Args:
        trace: A step.
        rewrite: Takes a call and the trace that is being made, to which it may add calls before
            that one. It returns the call, or in its place a value that is there already. Where the
            result is another value, the calls that follow read that one.
    """
    new_trace = trace.with_calls([])
    names: dict[Value, Value] = {}
    for call in trace.calls:
        made = rewrite(rename_call(call, names), new_trace)
        if isinstance(made, Call):
            new_trace.calls.append(made)
        result = made.result if isinstance(made, Call) else made
        if isinstance(call.result, Value) and result != call.result:
            names[call.result] = result
    new_trace.outputs = rename_values(trace.outputs, names)
    new_trace.share(names)
    return new_trace


def rename_call(call: Call, names: Mapping[Value, Value]) -> Call:
    """Replaces the operands, results and writes of `call` as `names` says."""
    if names.keys().isdisjoint((*call.operands, *call.results, *call.writes)):
        return call
    args, kwargs, result, writes = rename_values(
        (call.args, call.kwargs, call.result, call.writes), names
    )
    return attrs.evolve(call, args=args, kwargs=kwargs, result=result, writes=writes)


def repeat_calls(calls: Iterable[Call], names: dict[Value, Value], trace: Trace) -> list[Call]:
    """Copies `calls`; the results are new values of `trace`.

    Args:
        calls: Calls of a step, in order.
        names: By values that they read, the values to read instead. Their results are added.
        trace: The step.
    """
    copies = []
    for call in calls:
        for value in call.results:
            if value not in names:
                owner = numbered(trace.memory[value.number])
                memory = None if owner is value else names.get(owner, owner).number
                names[value] = trace.new(trace.form(value), memory)
        copies.append(rename_call(call, names))
    return copies
