"""All-reduces that write where their operand was."""

import attrs

from shardcore.adapters import torch_compat
from shardcore.adapters.capture.passes.liveness import last_uses
from shardcore.adapters.capture.tape import Call, Tape, Value, renamed, renamed_call


def with_sums_in_place(tape: Tape) -> Tape:
    """An all-reduce of what nobody reads afterwards makes no copy of it: torch's would.

    Not for Inductor, which knows no such operator, and does the same by itself.
    """
    last = last_uses(tape)
    names: dict[Value, Value] = {}
    calls = []
    for place, each in enumerate(tape.calls):
        call = renamed_call(each, names)
        if torch_compat.is_all_reduce(call.operator) and _may_be_written(each, place, last, tape):
            names[call.result] = call.args[0]
            call = _in_place(call)
        calls.append(call)
    found = tape.with_calls(calls)
    found.outputs = renamed(tape.outputs, names)
    found.share(names)
    return found


def _may_be_written(call: Call, place: int, last: dict[int, int], tape: Tape) -> bool:
    operand = call.args[0]
    return tape.form(operand).is_dense and last.get(tape.memory[operand.number]) == place


def _in_place(call: Call) -> Call:
    value, operator = call.args[0], torch_compat.all_reduce_in_place()
    return attrs.evolve(call, operator=operator, result=value, writes=(value,))
