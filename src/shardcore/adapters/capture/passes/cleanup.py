"""Drops calls that do nothing: aliases for autograd, unused results."""

import attrs
import torch

from shardcore.adapters import torch_compat
from shardcore.adapters.capture.guards import check
from shardcore.adapters.capture.tape import Call, Tape, Value, renamed, renamed_call, values

_ALIASES = {
    torch.ops.aten.alias.default,
    torch.ops.aten.detach.default,
    torch.ops.aten.detach_.default,
    torch.ops.aten.lift_fresh.default,
}


def without_aliases(tape: Tape) -> Tape:
    """Returns `tape` without calls that only concern autograd: each result is the operand."""
    names: dict[Value, Value] = {}
    calls = []
    for each in tape.calls:
        call = renamed_call(each, names)
        if call.operator in _ALIASES or _is_view_of_own_shape(call):
            names[call.result] = call.args[0]
        else:
            calls.append(call)
    found = tape.with_calls(calls)
    found.outputs = renamed(tape.outputs, names)
    return found


def _is_view_of_own_shape(call: Call) -> bool:
    return call.operator is torch.ops.aten.view_as.default and call.args[0] == call.args[1]


def with_plain_ones(tape: Tape) -> Tape:
    """Returns `tape` with a constant for the gradient that a backward pass begins with.

    `ones_like` of the loss reads its shape only: the loss may then be summed over the ranks later.
    """
    return tape.with_calls(_plain(call, tape) for call in tape.calls)


def _plain(call: Call, tape: Tape) -> Call:
    if call.operator is not torch.ops.aten.ones_like.default or not isinstance(call.result, Value):
        return call
    form = tape.form(call.result)
    if form.shape:
        return call
    made = {"dtype": form.dtype, "device": form.device}
    return attrs.evolve(call, operator=torch.ops.aten.ones.default, args=([],), kwargs=made)


def without_dead_code(tape: Tape) -> Tape:
    """Returns `tape` without calls on which no output, tensor outside, rank or draw depends."""
    read = set(values(tape.outputs))
    live = {tape.memory[value.number] for value in (*read, *tape.inputs)}
    live |= {tape.memory[number] for number in tape.outside}
    kept = []
    for call in reversed(tape.calls):
        # What writes is there for all that is in the memory; what does not, for its results.
        is_read = tape.writes_of(call) & live if call.writes else read & set(call.results)
        if is_read or _has_effect(call):
            kept.append(call)
            live |= tape.reads_of(call) | tape.writes_of(call)
            read |= set(call.operands)
    return tape.with_calls(reversed(kept))


def _has_effect(call: Call) -> bool:
    operator = call.operator
    draws, sends = torch_compat.draws(operator), torch_compat.is_of_collectives(operator)
    return draws or sends or operator is check
