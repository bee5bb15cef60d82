"""Makes the program of a step that was recorded."""

from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import attrs
import torch

from shardcore.binding.capture.agreement import Outcome
from shardcore.binding.capture.cache import CacheEntry
from shardcore.domain.capture import Event, NotCaptured, TracesDiffer
from shardcore.ports.capture import Program, RecordedSums, StepCapture, StepTrace

_DRAW = "if it is a random number, draw it by keras.random; else keep it in a variable"


@attrs.frozen
class ProgramMaker:
    """Makes the programs of the steps of a model.

    Args:
        trainer: The model.
        capture: Makes programs of traces.
    """

    trainer: Any
    capture: StepCapture[torch.Tensor]

    def make_program(
        self,
        entry: CacheEntry,
        trace: StepTrace,
        others: Sequence[Program],
        most: RecordedSums | None,
    ) -> Outcome:
        """Returns the outcome of recording a step, with a program if an earlier trace is equal.

        Args:
            entry: The earlier traces and the programs of such steps.
            trace: What the step did.
            others: Programs for batches of other sizes, one of which may replace an earlier trace.
            most: The all-reduces of all ranks; None if each rank decides by its own.
        """
        earlier = entry.traces.get(trace.numbers)
        try:
            if earlier is None:
                program = self._program_of_others([] if entry.programs else others, trace, most)
            else:
                program = self._program(earlier, trace, most)
            if program is None:
                return Outcome(Event.RECORDED)
            assert entry.guard is not None, "a step that was recorded has a guard"
            entry.guard.check_holds(program.captured_inputs)
        except TracesDiffer as difference:
            if entry.progress.after(Event.DIFFERED).is_unstable:
                return Outcome(Event.REFUSED, reason=f"{difference}: {_DRAW}")
            return Outcome(Event.DIFFERED)
        except NotCaptured as refusal:
            return Outcome(Event.REFUSED, reason=str(refusal))
        return Outcome(Event.MATCHED, program)

    def _program_of_others(
        self, others: Sequence[Program], trace: StepTrace, most: RecordedSums | None
    ) -> Program | None:
        """Returns the program of a step that ran as one of `others`; None if it did not."""
        for other in others:
            with suppress(TracesDiffer):
                return self._program(other, trace, most)
        return None

    def _program(
        self, earlier: StepTrace | Program, trace: StepTrace, most: RecordedSums | None
    ) -> Program:
        compiled = self.trainer.jit_compile is True
        return self.capture.program(earlier, trace, compiled=compiled, all_reduces=most)
