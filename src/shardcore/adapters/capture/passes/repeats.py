"""Calls that were made before, with the same operands."""

from collections import Counter
from typing import Any

from shardcore.adapters import torch_compat
from shardcore.adapters.capture.constants import written_memories
from shardcore.adapters.capture.passes.order import gathers, is_view
from shardcore.adapters.capture.tape import Call, Tape, Value, renamed, renamed_call, values


def without_repeats(tape: Tape) -> Tape:
    """The first of several calls that give the same: nobody has written in between.

    So is a weight gathered once that a layer uses at each of many time steps, and a sum over the
    ranks is made once that two read.
    """
    written = written_memories(tape)
    writes: Counter[int] = Counter()
    names: dict[Value, Value] = {}
    made: dict[str, Any] = {}
    calls = []
    for each in tape.calls:
        call = renamed_call(each, names)
        writes.update({tape.memory[value.number] for value in call.writes})
        # Who writes into what the second made would write into what the first made.
        if not _is_pure(call) or (tape.writes_of(call) & written and not is_view(call, tape)):
            calls.append(call)
            continue
        states = sorted((memory, writes[memory]) for memory in tape.reads_of(call))
        key = f"{call.operator} {call.args} {sorted(call.kwargs.items())} {states}"
        if key in made:
            pairs = zip(call.results, values(made[key]), strict=True)
            names.update((value, names.get(before, before)) for value, before in pairs)
        else:
            made[key] = call.result
            calls.append(call)
    found = tape.with_calls(calls)
    found.outputs = renamed(tape.outputs, names)
    found.share(names)  # what is a view of the second is one of the first
    return found


def _is_pure(call: Call) -> bool:
    sends_alike = gathers(call) or torch_compat.is_all_reduce(call.operator)
    return not (
        call.writes
        or torch_compat.draws(call.operator)
        or (torch_compat.is_of_collectives(call.operator) and not sends_alike)
        or not list(call.operands)  # a factory: another one may be written into by its reader
    )
