"""Calls that say something to autograd and do nothing to values."""

import attrs
import torch

from shardcore.adapters.capture.tape import Tape, Value, renamed

_NOTHING_TO_DO = {
    torch.ops.aten.alias.default,
    torch.ops.aten.detach.default,
    torch.ops.aten.detach_.default,
    torch.ops.aten.lift_fresh.default,
}


def without_aliases(tape: Tape) -> Tape:
    """Each of their results is the operand."""
    names: dict[Value, Value] = {}
    calls = []
    for call in tape.calls:
        args, kwargs = renamed((call.args, call.kwargs), names)
        if call.operator in _NOTHING_TO_DO:
            names[call.result] = args[0]
        else:
            result = renamed(call.result, names)
            writes = renamed(call.writes, names)
            calls.append(attrs.evolve(call, args=args, kwargs=kwargs, result=result, writes=writes))
    found = tape.with_calls(calls)
    found.outputs = renamed(tape.outputs, names)
    return found
