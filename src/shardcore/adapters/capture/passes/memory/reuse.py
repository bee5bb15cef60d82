"""Saves memory: results are written into the memory of dead operands."""

from typing import Any

import attrs
import torch

from shardcore.adapters import torch_private
from shardcore.adapters.capture.trace.analyses import last_uses
from shardcore.adapters.capture.trace.rewriting import rewrite_calls
from shardcore.adapters.capture.trace.trace import Call, Trace, Value


def with_operands_reused(trace: Trace) -> Trace:
    """Returns `trace` with results in the memory of dead operands.

    An all-reduce is done in place, where torch's would copy its operand. On a CPU, so are operators
    that read each element before they write it. Inductor does the same by itself.
    """
    uses, uses_and_sends = last_uses(trace), last_uses(trace, sends=True)

    def rewrite(call: Call, new_trace: Trace) -> Call:
        index = len(new_trace.calls)
        recorded = trace.calls[index]  # with the operands that uses were counted of
        if call.is_all_reduce:
            operand = recorded.args[0]
            if not trace.form(operand).is_dense or uses.get(trace.memory[operand.number]) != index:
                return call
            return _writing(call, torch_private.all_reduce_in_place(), call.args[0], {})
        ended = {
            memory for memory in trace.reads_of(recorded) if uses_and_sends.get(memory) == index
        }
        targets = zip(_overwritable(recorded), _overwritable(call), strict=True)
        target = next((new for old, new in targets if _fits(old, recorded, ended, trace)), None)
        variant = None if target is None else torch_private.writing_into(call.operator)
        if variant is None:
            return call
        return _writing(call, variant[0], target, {variant[1]: target})

    return rewrite_calls(trace, rewrite)


def _writing(call: Call, operator: Any, target: Any, kwargs: dict[str, Any]) -> Call:
    """Returns `call` by an operator that writes its result into `target`."""
    named = call.kwargs | kwargs
    return attrs.evolve(call, operator=operator, kwargs=named, result=target, writes=(target,))


def _overwritable(call: Call) -> tuple[Value, ...]:
    """Returns the operands of which `call` reads no element after it has written there."""
    if call.writes or not isinstance(call.result, Value):
        return ()
    if call.operator in torch_private.SOFTMAX_BACKWARD:
        return call.args[:1]  # a row is summed first, then read once more element by element
    is_pointwise = torch.Tag.pointwise in getattr(call.operator, "tags", ())
    draws = is_pointwise and call.draws
    return call.operands if is_pointwise and not draws else ()


def _fits(operand: Value, call: Call, ended: set[int], trace: Trace) -> bool:
    """Returns whether the result of `call` fits into `operand`, and no later call reads that."""
    memory, form = trace.memory[operand.number], trace.form(call.result)
    whole = trace.forms[memory]
    views = {value for value in call.operands if trace.memory[value.number] == memory}
    return (
        memory in ended
        and views == {operand}
        and trace.forms[operand.number] == form
        and form.is_dense
        and form.device.type == "cpu"
        and whole is not None
        and whole.bytes == form.bytes
    )
