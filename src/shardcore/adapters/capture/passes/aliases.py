"""Calls that say something to autograd and do nothing to values."""

import attrs
import torch

from shardcore.adapters.capture.tape import Call, Tape, Value, renamed

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
        if call.operator in _NOTHING_TO_DO or _is_as_itself(call):
            names[call.result] = args[0]
        else:
            result = renamed(call.result, names)
            writes = renamed(call.writes, names)
            calls.append(attrs.evolve(call, args=args, kwargs=kwargs, result=result, writes=writes))
    found = tape.with_calls(calls)
    found.outputs = renamed(tape.outputs, names)
    return found


def _is_as_itself(call: Call) -> bool:
    """Whether a tensor is viewed with its own shape, as DTensor does to its part of a result."""
    return call.operator is torch.ops.aten.view_as.default and call.args[0] == call.args[1]
