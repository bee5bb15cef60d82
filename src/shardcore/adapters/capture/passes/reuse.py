"""Results that are written where an operand was, of which nobody reads any more."""

from collections.abc import Iterable

import attrs
import torch

from shardcore.adapters import torch_compat
from shardcore.adapters.capture.passes.liveness import last_uses
from shardcore.adapters.capture.tape import Call, Tape, Value, renamed, renamed_call


def with_operands_reused(tape: Tape) -> Tape:
    """An operator that reads each element before it writes there makes no memory for its result.

    It writes into that of an operand that ends with it. On a CPU only.
    """
    last = last_uses(tape, sends=True)
    names: dict[Value, Value] = {}
    calls = []
    for place, each in enumerate(tape.calls):
        call = renamed_call(each, names)
        ended = {memory for memory in tape.reads_of(each) if last.get(memory) == place}
        variant = torch_compat.writing_into(call.operator) if _overwritable(each) else None
        operand = next((v for v in _overwritable(each) if _fits(v, each, ended, tape)), None)
        if variant is not None and operand is not None:
            (operator, name), target = variant, names.get(operand, operand)
            names[each.result] = target
            kwargs = {**call.kwargs, name: target}
            call = attrs.evolve(
                call, operator=operator, kwargs=kwargs, result=target, writes=(target,)
            )
        calls.append(call)
    found = tape.with_calls(calls)
    found.outputs = renamed(tape.outputs, names)
    found.share(names)
    return found


def _overwritable(call: Call) -> Iterable[Value]:
    """The operands of which `call` reads no element after it has written there."""
    if call.writes or not isinstance(call.result, Value):
        return ()
    if call.operator in torch_compat.SOFTMAX_BACKWARD:
        return call.args[:1]  # a row is summed, and then gone through element by element
    is_pointwise = torch.Tag.pointwise in getattr(call.operator, "tags", ())
    draws = is_pointwise and torch_compat.draws(call.operator)
    return tuple(call.operands) if is_pointwise and not draws else ()


def _fits(operand: Value, call: Call, ended: set[int], tape: Tape) -> bool:
    """Whether `operand` is all of a memory that ends here, seen once, and lies as the result."""
    memory, form = tape.memory[operand.number], tape.form(call.result)
    whole = tape.forms[memory]
    views = {value for value in call.operands if tape.memory[value.number] == memory}
    return (
        memory in ended
        and views == {operand}
        and tape.forms[operand.number] == form
        and form.is_dense
        and form.device.type == "cpu"
        and whole is not None
        and whole.bytes == form.bytes
    )
