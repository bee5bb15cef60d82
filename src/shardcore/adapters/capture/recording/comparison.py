"""Comparison of two runs of a step: of two recordings, and of an eager run with recorded ones.

An audit, for which `SHARDCORE_CAPTURE=audit` asks, runs a step that has programs eagerly, and
compares each operator with the recorded one. A difference shows that the step read Python state
that its guard does not compare.
"""

import os
import re
from collections.abc import Collection, Mapping, Sequence, Set
from typing import Any

import attrs
import torch

from shardcore.adapters import torch_private
from shardcore.adapters.capture.recording.recorder import Recorder
from shardcore.adapters.capture.trace import Call, Read, Trace, numbered, values
from shardcore.adapters.source_line import source_line
from shardcore.domain.capture import NotCaptured, TracesDiffer
from shardcore.domain.errors import AuditError, EnvironmentProblem


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


@attrs.frozen
class Source:
    """A recorded step, from which a program was made.

    Args:
        trace: Its operators, before any pass.
        literals: By number, its constants.
    """

    trace: Trace
    literals: Mapping[int, torch.Tensor]


class Auditor(Recorder):
    """Compares one eager run of a step with the recorded ones, operator by operator.

    Programs differ in the numbers that their step reads on the host. A run that reads others than
    all of them is compared up to that read.

    Args:
        inputs: The plain tensors of the batch.
        sources: The steps from which the programs were made.
    """

    def __init__(self, inputs: Sequence[Any], sources: Sequence[Source]) -> None:
        super().__init__(inputs)
        self._sources = list(sources)
        self._count = 0

    def _note_call(self, call: Call) -> None:
        expected = [source.trace.calls[self._count : self._count + 1] for source in self._sources]
        fitting = [
            source
            for source, calls in zip(self._sources, expected, strict=True)
            if calls and is_same_call(calls[0], call)
        ]
        if self._sources and not fitting:
            before = describe(expected[0][0]) if expected[0] else "the end of the step"
            raise AuditError(_audit_message(f"it ran {describe(call)} at {call.line}", before))
        self._sources = fitting
        self._count += 1

    def _note_read(self, read: Read) -> None:
        index = len(self.trace.reads)
        super()._note_read(read)
        reads = [source.trace.reads[index : index + 1] for source in self._sources]
        self._sources = [
            source
            for source, recorded in zip(self._sources, reads, strict=True)
            if recorded and repr(recorded[0].number) == repr(read.number)
        ]

    def check_end(self) -> None:
        """Checks that the step ended as a recorded one did, with the same constants.

        Raises:
            AuditError: If it did not.
        """
        if not self._sources:
            return
        if self.trace.refusal:
            raise AuditError(_audit_message(self.trace.refusal, "nothing of the kind"))
        ended = [source for source in self._sources if len(source.trace.calls) == self._count]
        if not ended:
            call = self._sources[0].trace.calls[self._count]
            raise AuditError(
                _audit_message(f"it ended at {source_line()}", f"{describe(call)} at {call.line}")
            )
        differences = [self._other_constant(source) for source in ended]
        if all(differences):
            raise AuditError(differences[0])

    def _other_constant(self, source: Source) -> str:
        """Compares the tensors from outside with those recorded; empty if they are the same."""
        for number, value in self.trace.outside.items():
            if number in source.literals:
                fits = are_equal(
                    source.literals[number], self.trace.first_values.get(number, value)
                )
            else:
                fits = is_same(source.trace.outside.get(number), value)
            if not fits:
                reader = reader_of(source.trace, number)
                return _audit_message(
                    f"{reader} reads another tensor", "the tensor of the recorded step"
                )
        return ""


def _audit_message(observed: str, recorded: str) -> str:
    return (
        f"The audit of a captured step found what no guard has seen: {observed}, where the "
        f"captured step has {recorded}. What its Python reads has changed. Keep it in a variable "
        "(add_weight of the layer), or run the model with jit_compile=False; and report it, please."
    )


_VARIABLE = "SHARDCORE_CAPTURE"
_USUAL_INTERVAL = 10


@attrs.frozen
class CaptureSetting:
    """The wishes of a user about captured steps.

    Args:
        at_once: Whether steps are recorded from the first one on, whether it pays (ADR 59) or not.
        audit_interval: One in so many captured steps is audited; 0 if none is.
    """

    at_once: bool = False
    audit_interval: int = 0

    @classmethod
    def of_environment(cls) -> "CaptureSetting":
        """Reads `SHARDCORE_CAPTURE`.

        Raises:
            EnvironmentProblem: If it has another value than "", "at-once", "audit" or "audit:5".
        """
        asked = os.environ.get(_VARIABLE, "")
        if asked in ("", "at-once"):
            return cls(at_once=bool(asked))
        match = re.fullmatch(r"audit(?::([1-9]\d*))?", asked)
        if match is None:
            raise EnvironmentProblem(
                f'{_VARIABLE} is {asked!r}. Set it to "at-once", which records steps from the '
                f'first one on; to "audit", which audits one captured step in {_USUAL_INTERVAL}; '
                'or to "audit:1", which audits all; or unset it.',
                name=_VARIABLE,
                got=repr(asked),
            )
        return cls(at_once=True, audit_interval=int(match.group(1) or _USUAL_INTERVAL))
