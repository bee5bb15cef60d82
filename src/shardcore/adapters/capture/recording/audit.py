"""Audits: a step that has programs runs eagerly, and each operator is compared with the recorded.

`SHARDCORE_CAPTURE=audit` asks for it. A difference shows that the step read Python state that its
guard does not compare.
"""

import os
import re
from collections.abc import Mapping, Sequence
from typing import Any

import attrs
import torch

from shardcore.adapters.capture.recording.comparison import (
    are_equal,
    describe,
    is_same,
    is_same_call,
    reader_of,
)
from shardcore.adapters.capture.recording.recorder import Recorder
from shardcore.adapters.capture.recording.source_line import source_line
from shardcore.adapters.capture.trace.trace import Call, Read, Trace
from shardcore.domain.errors import AuditError, EnvironmentProblem


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
        at_once: Whether steps are recorded from the first one on, whether it pays or not.
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
