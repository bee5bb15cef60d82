"""Checks within a program: it goes on if the step reads the recorded numbers on the host.

If not, the writes of this run are undone, and the step is as if it had not begun.
"""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import attrs
import torch

from shardcore.adapters import torch_private
from shardcore.adapters.capture.analyses import repeat_calls
from shardcore.adapters.capture.recording.comparison import varying_memories
from shardcore.adapters.capture.recording.functions import generator_states, set_generator_states
from shardcore.adapters.capture.trace import Call, Literals, Read, Trace, Value, numbered
from shardcore.domain.capture import GuardFailed, NotCaptured

# The most bytes that a run may write before its last check: they are copied at each run.
_MOST_BYTES = 64 * 2**20

# Of CTC, for instance: torch makes a result whose shape depends on the lengths of the labels.
_IN_KERAS = f"{os.sep}keras{os.sep}src{os.sep}"
_BY_KERAS = "Keras computes it so, and a step with it cannot be captured"
_REMEDY = "compute with keras.ops, or read one number, as by float(x)"


def check(tensor: torch.Tensor, number: Any) -> None:
    """Checks that `tensor` holds the recorded number.

    Raises:
        GuardFailed: If it holds another number.
    """
    if tensor.item() != number:
        raise GuardFailed


def with_checks(trace: Trace, literals: Literals) -> Trace:
    """Adds a check of each number that the step reads, unless all runs read the same.

    A number that depends on state alone, a count of steps for instance, is computed and checked at
    the beginning; any other where the step reads it.

    Raises:
        NotCaptured: If it reads more than one number at once.
    """
    varying = varying_memories(trace, literals) if trace.reads else set()
    reads = [read for read in trace.reads if trace.memory[read.value.number] in varying]
    if lines := [read.line for read in reads if read.number is None]:
        remedy = _BY_KERAS if _IN_KERAS in lines[0] else _REMEDY
        raise NotCaptured(f"the step reads values on the host: {lines[0]}: {remedy}")
    checked = trace.with_calls(trace.calls)
    first: list[Call] = []
    for read in reversed(reads):
        ahead = _ahead(read, trace.calls[: read.index], checked)
        if ahead is None:
            checked.calls.insert(read.index, _check(read, read.value))
        else:
            first += ahead
    checked.calls = [*first, *checked.calls]
    return checked


def _check(read: Read, value: Value) -> Call:
    return Call(check, (value, read.number), {}, None, (), read.line)


def _ahead(read: Read, before: Sequence[Call], trace: Trace) -> list[Call] | None:
    """Makes calls that compute the value of `read`, and check it, at the beginning of `trace`.

    They write into copies of the tensors from outside. None if they cannot run there, or if several
    views of one memory would need one copy.

    Args:
        read: A read of a number.
        before: The calls before it, as recorded.
        trace: The step, to which new values are added.
    """
    needed = {trace.memory[read.value.number]}
    calls: list[Call] = []
    for call in reversed(before):
        if trace.writes_of(call) & needed:
            calls.append(call)
            needed |= trace.reads_of(call) | trace.writes_of(call)
    written = trace.memories(value for call in calls for value in call.writes)
    outside = [numbered(number) for number in trace.outside if trace.memory[number] in written]
    is_viewed = len(trace.memories(outside)) < len(outside)
    if is_viewed or needed & trace.memories(trace.inputs) or not all(map(_may_be_ahead, calls)):
        return None
    names = {value: trace.new(trace.form(value)) for value in outside}
    copies = [Call(torch.ops.aten.clone.default, (old,), {}, new) for old, new in names.items()]
    again = repeat_calls(reversed(calls), names, trace)
    return [*copies, *again, _check(read, names.get(read.value, read.value))]


def _may_be_ahead(call: Call) -> bool:
    sends, draws = torch_private.is_of_collectives, torch_private.draws
    return isinstance(call.result, Value) and not (draws(call.operator) or sends(call.operator))


def rollback_of(trace: Trace, captured_inputs: Sequence[Any]) -> "Rollback":
    """Finds the writes before the last check, to undo; none in a step without checks.

    Raises:
        NotCaptured: If it writes too much before its last check.
    """
    checks = [index for index, call in enumerate(trace.calls) if call.operator is check]
    last = max(checks, default=0)
    before = trace.calls[:last]
    memories = set[int]().union(*map(trace.writes_of, before))
    inputs = tuple(
        n for n, value in enumerate(trace.inputs) if trace.memory[value.number] in memories
    )
    ours = set(map(id, captured_inputs))
    written = tuple(
        tensor
        for number, tensor in trace.outside.items()
        if trace.memory[number] in memories and id(tensor) in ours
    )
    if (size := sum(tensor.nbytes for tensor in written)) > _MOST_BYTES:
        line = trace.calls[last].line
        raise NotCaptured(
            f"after it has written {size} bytes it reads values on the host: {line}: read them "
            "earlier in the step"
        )
    draws = any(call.draws for call in before)
    return Rollback(inputs, written, draws)


@attrs.frozen
class Rollback:
    """Undoes the writes of a run if a check fails.

    Args:
        inputs: The indices of the inputs that the program writes into before its last check.
        written: The tensors of the model that it writes into before.
        draws: Whether it draws from torch's generator before.
    """

    inputs: tuple[int, ...]
    written: tuple[torch.Tensor, ...]
    draws: bool

    @contextmanager
    def undo_on_failure(self, inputs: Sequence[Any]) -> Iterator[None]:
        """Opens a context for a run with these inputs; undoes its writes if a check fails.

        Raises:
            GuardFailed: If a check fails; all is then as before.
        """
        written = [*(inputs[n] for n in self.inputs), *self.written]
        before = [tensor.detach().clone() for tensor in written]
        states = generator_states() if self.draws else []
        try:
            yield
        except GuardFailed:
            for tensor, value in zip(written, before, strict=True):
                tensor.detach().copy_(value)
            if states:
                set_generator_states(states)
            raise
