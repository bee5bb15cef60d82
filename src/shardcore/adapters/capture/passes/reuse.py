"""Writes results into the memory of operands that nothing reads afterwards."""

from collections.abc import Iterable, Mapping

import attrs
import torch

from shardcore.adapters import torch_compat
from shardcore.adapters.capture.passes.liveness import last_uses
from shardcore.adapters.capture.tape import Call, Tape, Value, renamed, renamed_call


def with_sums_in_place(tape: Tape) -> Tape:
    """Returns `tape` with all-reduces in place where nothing reads the operand afterwards.

    torch's would copy it. Not for Inductor, which does the same by itself.
    """
    last = last_uses(tape)
    operator = torch_compat.all_reduce_in_place()
    names: dict[Value, Value] = {}
    calls = []
    for place, each in enumerate(tape.calls):
        call = renamed_call(each, names)
        if torch_compat.is_all_reduce(call.operator):
            operand = each.args[0]
            if tape.form(operand).is_dense and last.get(tape.memory[operand.number]) == place:
                target = names[each.result] = call.args[0]
                call = attrs.evolve(call, operator=operator, result=target, writes=(target,))
        calls.append(call)
    return _with_shared(tape, calls, names)


def with_operands_reused(tape: Tape) -> Tape:
    """Returns `tape` with results in the memory of operands that end there, on a CPU.

    The operators are those that read each element before they write it.
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
    return _with_shared(tape, calls, names)


def _with_shared(tape: Tape, calls: list[Call], names: Mapping[Value, Value]) -> Tape:
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
