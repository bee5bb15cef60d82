"""Records a step and runs it, for the tests of captured steps and of their passes."""

from itertools import accumulate

import torch
from torch.profiler import ProfilerActivity, profile

from shardcore.adapters.capture.recording.recorder import Recorder
from shardcore.adapters.capture.running.generated import function_of
from shardcore.adapters.capture.trace import Value
from shardcore.adapters.torch_private import tree_leaves


def after(step, one_pass, *tensors):
    """The trace of `step` after a pass; its results, and what it leaves in memory, are the same."""
    trace = recorded(step, *tensors)
    traces = trace, one_pass(trace)
    assert unshared_views(traces[1]) == []
    found = [_run(trace, tensors) for trace in traces]
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other)
        assert one.dtype == other.dtype
        assert one.stride() == other.stride()
    return traces[1]


def unshared_views(trace):
    """The calls that return a view of an operand, in memory that the trace calls another."""
    return [
        call
        for call in trace.calls
        for argument, value in zip(_arguments(call), call.args, strict=False)
        if argument.alias_info is not None
        and isinstance(value, Value)
        and any(trace.memory[each.number] != trace.memory[value.number] for each in call.results)
        and _gives_views(call)
    ]


def _arguments(call):
    schema = getattr(call.operator, "_schema", None)
    return () if schema is None else schema.arguments


def _gives_views(call):
    """Not what is written into, which may be one result of several."""
    return not call.operator._schema.is_mutable and len(call.operator._schema.returns) == 1


def names(trace):
    """Its operators, in order."""
    return [call.operator.__name__.partition(".")[0] for call in trace.calls]


def _run(trace, tensors):
    copies = [each.clone() for each in tensors]
    return *function_of(trace, {n: trace.first_values[n] for n in trace.outside})(*copies), *copies


def recorded(step, *tensors):
    """The trace of `step` of copies of `tensors`."""
    copies = [each.clone() for each in tensors]
    recorder = Recorder(copies)
    recorder.run(lambda: step(*copies))
    return recorder.trace


def results(trace, tensors):
    """The results of `trace` for `tensors`, and the values of `tensors` after it."""
    copies = [each.clone() for each in tensors]
    found = function_of(trace, {n: trace.first_values[n] for n in trace.outside})(*copies)
    return [each.tolist() for each in (*found, *copies)]


def changed(step, one_pass, *tensors):
    """The operators of `step` before and after a pass, which gives the results of the step."""
    trace = recorded(step, *tensors)
    other = one_pass(trace)
    assert results(other, tensors) == eagerly(step, tensors)
    return names(trace), names(other)


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
