"""Constants of a step: tensors that each run creates from the same Python numbers."""

from collections.abc import Collection, Set
from typing import Any

import torch

from shardcore.adapters import torch_private
from shardcore.adapters.capture.trace.trace import Trace, numbered, values
from shardcore.domain.steps.capture import NotCaptured, TracesDiffer


def literals(first: Trace, second: Trace) -> dict[int, torch.Tensor]:
    """Returns, by number, the tensors that both runs of a step create with the same values.

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
    """Returns the constants of a run with batches of another size than `earlier`, by number.

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
    """Returns the calls without their numbers, and what the step takes and returns."""
    calls = [(call.operator, call.operands, call.results, call.writes) for call in trace.calls]
    reads = [read.value for read in trace.reads]
    return (*calls, trace.inputs, reads, trace.outside.keys(), values(trace.outputs))


def is_same(before: object, now: object) -> bool:
    """Returns whether both runs read the same tensor or the same generator."""
    if isinstance(before, torch.Generator) and isinstance(now, torch.Generator):
        return torch_private.identity_of(before) == torch_private.identity_of(now)
    return before is now


def are_equal(first: object, second: object) -> bool:
    """Returns whether two tensors have the same values, of which some may be NaN."""
    return (
        isinstance(first, torch.Tensor)
        and isinstance(second, torch.Tensor)
        and first.shape == second.shape
        and first.dtype == second.dtype
        and bool(((first == second) | ((first != first) & (second != second))).all())
    )


def varying_memories(trace: Trace, literal: Collection[int]) -> set[int]:
    """Returns the memories whose values may differ in the next run."""
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
    """Returns the first operator that reads a value, and its line."""
    for call in trace.calls:
        if numbered(number) in call.operands:
            return f"{call.operator} at {call.line}"
    return "the step"
