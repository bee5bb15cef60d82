"""What tests of passes share: a step is recorded and run before and after a pass."""

import torch

from shardcore.adapters.capture.generated import function_of
from shardcore.adapters.capture.recorder import Recorder
from shardcore.adapters.capture.tape import Value


def after(step, one_pass, *tensors):
    """The tape of `step` after a pass; its results, and what it leaves in memory, are the same."""
    copies = [each.clone() for each in tensors]
    recorder = Recorder(copies)
    recorder.run(lambda: step(*copies))
    tapes = recorder.tape, one_pass(recorder.tape)
    assert unshared_views(tapes[1]) == []
    found = [_run(tape, tensors) for tape in tapes]
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other)
        assert one.dtype == other.dtype
        assert one.stride() == other.stride()
    return tapes[1]


def unshared_views(tape):
    """The calls whose result is a view of an operand, and which the tape says lies elsewhere."""
    return [
        call
        for call in tape.calls
        for argument, value in zip(_arguments(call), call.args, strict=False)
        if argument.alias_info is not None
        and isinstance(value, Value)
        and any(tape.memory[each.number] != tape.memory[value.number] for each in call.results)
        and _gives_views(call)
    ]


def _arguments(call):
    schema = getattr(call.operator, "_schema", None)
    return () if schema is None else schema.arguments


def _gives_views(call):
    """Not what is written into, which may be one result of several."""
    return not call.operator._schema.is_mutable and len(call.operator._schema.returns) == 1


def names(tape):
    """Its operators, in order."""
    return [call.operator.__name__.partition(".")[0] for call in tape.calls]


def _run(tape, tensors):
    copies = [each.clone() for each in tensors]
    return *function_of(tape, {n: tape.found[n] for n in tape.outside})(*copies), *copies
