"""Pointwise operators that are told where to write, instead of making memory for each result."""

import attrs
import torch

from shardcore.adapters import torch_compat
from shardcore.adapters.capture.tape import Call, Tape, Value


def with_results_told(part: Tape) -> Tape:
    """Outputs are written into further inputs; others where an operand was that nobody reads now.

    Args:
        part: Pointwise calls, of which no two values share memory but by writing in place.

    Returns:
        A tape with an input more for each output, of its form, to be written into; its outputs are
        these.
    """
    found = part.with_calls([])
    targets = {value: found.new(found.form(value)) for value in part.outputs}
    found.inputs = [*part.inputs, *targets.values()]
    last = {value: place for place, call in enumerate(part.calls) for value in call.operands}
    free = set[Value]()  # made here, and no output
    for place, call in enumerate(part.calls):
        ended = [value for value in call.operands if value in free and last[value] == place]
        found.calls.append(_told(call, targets, ended, found))
        free |= {call.result} - targets.keys() - set(call.writes)
    told = {
        each for call in found.calls for each in call.kwargs.values() if isinstance(each, Value)
    }
    found.calls += [
        Call(_COPY, (target, value), {}, target, (target,))
        for value, target in targets.items()
        if target not in told
    ]
    found.outputs = tuple(targets.values())
    return found


_COPY = torch.ops.aten.copy_.default


def _told(call: Call, targets: dict[Value, Value], ended: list[Value], tape: Tape) -> Call:
    """`call`, which writes into what takes its result, or into one of `ended` that lies as it."""
    variant = torch_compat.writing_into(call.operator)
    if call.writes or variant is None:
        return call
    form = tape.form(call.result)
    place = targets.get(call.result) or next((v for v in ended if tape.form(v) == form), None)
    if place is None or not form.is_dense:
        return call
    operator, name = variant
    return attrs.evolve(call, operator=operator, kwargs={**call.kwargs, name: place})
