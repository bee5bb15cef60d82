"""The programs of a step, by what its batches have in common."""

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import attrs

from shardcore.binding.capture.agreement import Outcome
from shardcore.binding.capture.python_state.guard import PythonGuard
from shardcore.binding.capture.signatures import Signature, below_autocast
from shardcore.domain.capture import (
    Event,
    GuardFailed,
    NotCaptured,
    Payback,
    Progress,
    State,
    TracesDiffer,
)
from shardcore.ports.capture import Program, StepTrace

# Traces without a program are dropped after this many runs: they hold copies of small tensors.
_MANY_RUNS = 1000
_DRAW = "if it is a random number, draw it by keras.random; else keep it in a variable"


@attrs.define(eq=False)
class CacheEntry:
    """The programs and traces of the steps with batches of one signature.

    Args:
        signature: That of the batches.
        progress: The state of these steps.
        traces: Runs that have no program yet, by the numbers that they read on the host.
        programs: The step, specialized to the numbers that it reads; the last one that ran first.
        unstable: Why these steps change too often to be captured; empty if they do not.
        guard: What Python held after the last trace; None before the first, and at the end.
        payback: The eager steps, and from when on recording one pays (ADR 59).
    """

    signature: Signature
    progress: Progress
    traces: dict[tuple[Any, ...], StepTrace] = attrs.field(factory=dict)
    programs: list[Program] = attrs.field(factory=list)
    guard: PythonGuard | None = None
    unstable: str = ""
    payback: Payback = attrs.field(factory=Payback)
    _was_due: bool = attrs.field(default=False, init=False)

    def apply_event(self, event: Event) -> None:
        """Notes `event`; drops what the new state has no use for."""
        self.progress = self.progress.after(event)
        if self.progress.state in (State.NEW, State.EAGER):
            self.programs, self.traces, self.guard = [], {}, None
        if event is Event.POSTPONED:
            self.payback, self._was_due = self.payback.postponed(), False

    def is_due(self, left: float | None, recordings: int) -> bool:
        """Decides whether the step is recorded, now that it has no trace.

        Once it was, it is again until all ranks postpone it: Python state may change on one rank
        alone, which begins again while the others record their second step.

        Args:
            left: The steps that are left; None if that is unknown.
            recordings: The recorded steps that a program takes.
        """
        self._was_due = self._was_due or self.payback.is_due(left, recordings)
        return self._was_due

    def run_eagerly(self, step: Callable[[], Any]) -> Any:
        """Runs `step`, and adds its seconds to what recording must pay back."""
        began = time.perf_counter()
        outputs = step()
        self.payback = self.payback.after(time.perf_counter() - began)
        return outputs

    def run(
        self, tensors: Sequence[object], owner: Program | None = None
    ) -> tuple[Any, Program] | None:
        """Runs the first program whose guards hold: its outputs and itself, None without one.

        `owner` may overwrite the tensors: it has made them, and nothing else holds them.
        """
        for program in list(self.programs):
            with suppress(GuardFailed), below_autocast():
                outputs = program(tensors, owned=program is owner)
                self.note_run(program)
                return outputs, program
        return None

    def note_run(self, program: Program) -> None:
        """Notes that `program` ran: the next step tries it first."""
        self.apply_event(Event.RAN)
        if self.progress.runs % _MANY_RUNS == 0:
            self.traces.clear()
        if program is not self.programs[0]:
            self.programs.remove(program)
            self.programs.insert(0, program)

    def make_program(
        self,
        trace: StepTrace,
        others: Sequence[Program],
        make: Callable[[StepTrace | Program], Program],
    ) -> Outcome:
        """Makes a program of a recorded step if an earlier trace is equal.

        Args:
            trace: What the step did.
            others: Programs for batches of other sizes, one of which may replace an earlier trace.
            make: Makes the program by an earlier trace, or by a program of `others`.
        """
        earlier = self.traces.get(trace.numbers)
        try:
            with below_autocast():  # as it runs: passes compute constants
                if earlier is None:
                    program = _make_by_one([] if self.programs else others, make)
                else:
                    program = make(earlier)
            if program is None:
                return Outcome(Event.RECORDED)
            assert self.guard is not None, "a step that was recorded has a guard"
            self.guard.check_holds(program.captured_inputs)
        except TracesDiffer as difference:
            if self.progress.after(Event.DIFFERED).is_unstable:
                return Outcome(Event.REFUSED, reason=f"{difference}: {_DRAW}")
            return Outcome(Event.DIFFERED)
        except NotCaptured as refusal:
            return Outcome(Event.REFUSED, reason=str(refusal))
        return Outcome(Event.MATCHED, program)


@attrs.frozen(eq=False)
class LastRun:
    """The last run of a program.

    Args:
        entry: What is known of batches like those of the run.
        program: The program.
        fits_itself: Whether its outputs have the shapes and layouts of its inputs.
    """

    entry: CacheEntry
    program: Program
    fits_itself: bool


def _make_by_one(
    others: Sequence[Program], make: Callable[[StepTrace | Program], Program]
) -> Program | None:
    for other in others:
        with suppress(TracesDiffer):
            return make(other)
    return None
