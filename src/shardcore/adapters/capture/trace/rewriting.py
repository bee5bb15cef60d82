"""Replaces calls and values of a trace."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import attrs

from shardcore.adapters import torch_private
from shardcore.adapters.capture.trace.trace import Call, Number, Trace, Value, numbered


def rename_values(nest: Any, names: Mapping[Value, Value]) -> Any:
    """Replaces values as `names` says, also those of numbers."""

    def name(leaf: Any) -> Any:
        if isinstance(leaf, Number):
            return Number(names.get(leaf.value, leaf.value))
        return names.get(leaf, leaf) if isinstance(leaf, Value) else leaf

    return torch_private.tree_map(name, nest)


def rewrite_calls(trace: Trace, rewrite: Callable[[Call, Trace], Call | Value]) -> Trace:
    """Replaces each call by what `rewrite` returns for it.

    Args:
        trace: A step.
        rewrite: Takes a call and the trace that is being made, to which it may add calls before
            that one. It returns the call, or in its place a value that is there already. Where the
            result is another value, the calls that follow read that one.
    """
    new_trace = trace.with_calls([])
    names: dict[Value, Value] = {}
    for call in trace.calls:
        made = rewrite(rename_call(call, names), new_trace)
        if isinstance(made, Call):
            new_trace.calls.append(made)
        result = made.result if isinstance(made, Call) else made
        if isinstance(call.result, Value) and result != call.result:
            names[call.result] = result
    new_trace.outputs = rename_values(trace.outputs, names)
    new_trace.share(names)
    return new_trace


def rename_call(call: Call, names: Mapping[Value, Value]) -> Call:
    """Replaces the operands, results and writes of `call` as `names` says."""
    if names.keys().isdisjoint((*call.operands, *call.results, *call.writes)):
        return call
    args, kwargs, result, writes = rename_values(
        (call.args, call.kwargs, call.result, call.writes), names
    )
    return attrs.evolve(call, args=args, kwargs=kwargs, result=result, writes=writes)


def repeat_calls(calls: Iterable[Call], names: dict[Value, Value], trace: Trace) -> list[Call]:
    """Copies `calls`; the results are new values of `trace`.

    Args:
        calls: Calls of a step, in order.
        names: By values that they read, the values to read instead. Their results are added.
        trace: The step.
    """
    copies = []
    for call in calls:
        for value in call.results:
            if value not in names:
                owner = numbered(trace.memory[value.number])
                memory = None if owner is value else names.get(owner, owner).number
                names[value] = trace.new(trace.form(value), memory)
        copies.append(rename_call(call, names))
    return copies
