"""Records a step and runs it, for the tests of captured steps and of their passes."""

from itertools import accumulate

import torch
from torch.profiler import ProfilerActivity, profile

from shardcore.adapters.capture.recording.recorder import Recorder
from shardcore.adapters.capture.running.generated import function_of
from shardcore.adapters.capture.tape.tape import Value
from shardcore.adapters.torch_private import tree_leaves


def after(step, one_pass, *tensors):
    """The tape of `step` after a pass; its results, and what it leaves in memory, are the same."""
    tape = recorded(step, *tensors)
    tapes = tape, one_pass(tape)
    assert unshared_views(tapes[1]) == []
    found = [_run(tape, tensors) for tape in tapes]
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other)
        assert one.dtype == other.dtype
        assert one.stride() == other.stride()
    return tapes[1]


def unshared_views(tape):
    """The calls that return a view of an operand, in memory that the tape calls another."""
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


def recorded(step, *tensors):
    """The tape of `step` of copies of `tensors`."""
    copies = [each.clone() for each in tensors]
    recorder = Recorder(copies)
    recorder.run(lambda: step(*copies))
    return recorder.tape


def results(tape, tensors):
    """The results of `tape` for `tensors`, and the values of `tensors` after it."""
    copies = [each.clone() for each in tensors]
    found = function_of(tape, {n: tape.found[n] for n in tape.outside})(*copies)
    return [each.tolist() for each in (*found, *copies)]


def changed(step, one_pass, *tensors):
    """The operators of `step` before and after a pass, which gives the results of the step."""
    tape = recorded(step, *tensors)
    other = one_pass(tape)
    assert results(other, tensors) == eagerly(step, tensors)
    return names(tape), names(other)


def eagerly(step, tensors):
    """The results of `step` for `tensors`, and the values of `tensors` after it."""
    copies = [each.clone() for each in tensors]
    found = tree_leaves(step(*copies))
    return [each.tolist() for each in (*found, *copies)]


def highest(run):
    """The most bytes that `run` holds at a time."""
    options = {"profile_memory": True, "acc_events": True}  # torch 2.11 warns without the second
    with profile(activities=[ProfilerActivity.CPU], **options) as profiled:
        run()
    events = profiled.profiler.kineto_results.events()
    changes = [(each.start_ns(), each.nbytes()) for each in events if each.name() == "[memory]"]
    return max(accumulate(size for _, size in sorted(changes, key=lambda change: change[0])))
