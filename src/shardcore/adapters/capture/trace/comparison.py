"""Comparison of two runs of a step, operator by operator."""

from shardcore.adapters import torch_private
from shardcore.adapters.capture.trace.trace import Call, Trace


def difference(first: Trace, second: Trace) -> str:
    """Returns how two runs of a step differ, empty if they are the same."""
    for one, other in zip(first.calls, second.calls, strict=False):
        if not is_same_call(one, other):
            return f"{describe(one)} in one step was {describe(other)} in the next, at {other.line}"
    if len(first.calls) != len(second.calls):
        return f"it ran {len(first.calls)} operators in one step, {len(second.calls)} in the next"
    if first.inputs != second.inputs or first.outside.keys() != second.outside.keys():
        return "its operators read other tensors in each step"
    if first.outputs != second.outputs:
        return f"it returned {first.outputs} in one step, {second.outputs} in the next"
    return ""


def is_same_call(one: Call, other: Call) -> bool:
    """Returns whether two runs called the same operator on the same values and numbers."""
    return one == other or repr(one) == repr(other)  # a nan is not equal to itself


def describe(call: Call) -> str:
    """Returns an operator and its numbers, for messages."""
    leaves = torch_private.tree_leaves((call.args, call.kwargs))
    plain = [leaf for leaf in leaves if isinstance(leaf, bool | int | float | complex)]
    return f"{call.operator} with {plain}" if plain else str(call.operator)
