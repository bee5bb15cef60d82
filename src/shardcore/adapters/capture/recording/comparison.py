"""Comparison of two runs of a step: their operators, and the constants that both create alike."""

from collections.abc import Collection, Set
from typing import Any

import torch

from shardcore.adapters import torch_private
from shardcore.adapters.capture.trace.trace import Call, Trace, numbered, values
from shardcore.domain.capture import NotCaptured, TracesDiffer


def literals(first: Trace, second: Trace) -> dict[int, torch.Tensor]:
    """Finds, by number, the tensors that both runs of a step create with the same values.

    Raises:
        NotCaptured: If the values of one differ.
    """
    constants = {}
    written = second.overwritten()
    for number, value in second.outside.items():
        before = first.outside[number]
        if is_same(before, value):
            continue
        constant = second.first_values.get(number)
        if constant is None and second.memory[number] not in written:
            # The first of two large tensors in one buffer is overwritten: its values are unknown.
            constant = value if before.data_ptr() != value.data_ptr() else None
        if constant is None or not are_equal(first.first_values.get(number, before), constant):
            raise NotCaptured(
                f"{reader_of(second, number)} reads a tensor that Python creates with other values "
                "in each step: pass it in the batch, or keep it in a variable"
            )
        constants[number] = constant
    return constants


def literals_of_other_size(
    earlier: Trace, known: Set[int], trace: Trace
) -> dict[int, torch.Tensor]:
    """Finds the constants of a run with batches of another size than `earlier`, by number.

    Args:
        earlier: The trace of a program.
        known: The numbers of its constants.
        trace: The run.

    Raises:
        TracesDiffer: If it has other calls, or reads other tensors.
    """
    is_same_step = _calls(earlier) == _calls(trace) and all(
        number in known or is_same(value, trace.outside[number])
        for number, value in earlier.outside.items()
    )
    if not is_same_step or not known <= trace.first_values.keys():
        raise TracesDiffer("it has other operators than with batches of another size")
    return {number: trace.first_values[number] for number in known}


def _calls(trace: Trace) -> tuple[Any, ...]:
    """Leaves out numbers, and adds what the step takes and returns."""
    calls = [(call.operator, call.operands, call.results, call.writes) for call in trace.calls]
    reads = [read.value for read in trace.reads]
    return (*calls, trace.inputs, reads, trace.outside.keys(), values(trace.outputs))


def is_same(before: object, now: object) -> bool:
    """Compares identities: one generator has several Python objects."""
    if isinstance(before, torch.Generator) and isinstance(now, torch.Generator):
        return torch_private.identity_of(before) == torch_private.identity_of(now)
    return before is now


def are_equal(first: object, second: object) -> bool:
    """Compares the values of tensors; NaN equals NaN."""
    return (
        isinstance(first, torch.Tensor)
        and isinstance(second, torch.Tensor)
        and first.shape == second.shape
        and first.dtype == second.dtype
        and bool(((first == second) | ((first != first) & (second != second))).all())
    )


def varying_memories(trace: Trace, literal: Collection[int]) -> set[int]:
    """Follows the batch, state and draws to all memories that they change, run by run."""
    outside = (numbered(number) for number in trace.outside if number not in literal)
    varying = trace.memories((*trace.inputs, *outside))
    grown = True
    while grown:  # a write may come after a read of the same memory
        before = len(varying)
        for call in trace.calls:
            if call.draws or trace.reads_of(call) & varying:
                varying |= trace.writes_of(call)
        grown = len(varying) > before
    return varying


def reader_of(trace: Trace, number: int) -> str:
    """Names the first operator that reads a value, and its line."""
    for call in trace.calls:
        if numbered(number) in call.operands:
            return f"{call.operator} at {call.line}"
    return "the step"


def difference(first: Trace, second: Trace) -> str:
    """Describes the first difference between two runs of a step; empty if there is none."""
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
    """Compares operators, values and numbers."""
    return one == other or repr(one) == repr(other)  # a nan is not equal to itself


def describe(call: Call) -> str:
    """Names an operator and its numbers, for messages."""
    leaves = torch_private.tree_leaves((call.args, call.kwargs))
    plain = [leaf for leaf in leaves if isinstance(leaf, bool | int | float | complex)]
    return f"{call.operator} with {plain}" if plain else str(call.operator)
