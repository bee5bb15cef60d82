"""Runs a step from a program where it can, and else eagerly, to record it (ADR 16).

The states of a step, and what leads from one to another, are in `domain.capture`.
"""

import math
import time
from collections.abc import Callable, Hashable, Sequence
from functools import partial
from typing import Any

import attrs
import torch

from shardcore.binding import keras_private
from shardcore.binding.capture.agreement import Outcome, agree_on_outcome, gather_from_ranks
from shardcore.binding.capture.cache import CacheEntry, LastRun
from shardcore.binding.capture.large_steps import Recording
from shardcore.binding.capture.local_tensors import local_tensors, why_not_seen
from shardcore.binding.capture.python_state.guard import PythonGuard
from shardcore.binding.capture.python_state.observed import ObservedCalls
from shardcore.binding.capture.python_state.thread_profile import is_profiled
from shardcore.binding.capture.reports import Reports
from shardcore.binding.capture.signatures import Closures, Signature
from shardcore.binding.ranks.rank_consistency import wait_for_new_trace
from shardcore.binding.ranks.session import Session
from shardcore.domain.capture import Event, NotCaptured, Progress, State
from shardcore.domain.cost.step_figures import StepCounts
from shardcore.domain.garbage import without_collection
from shardcore.ports.capture import Program, RecordedSums, StepCapture, StepTrace

_KEEP = "keep it in a variable (add_weight of the layer, or keras.Variable)"
# Batches by their shapes, for which one function keeps programs.
_MOST_SIGNATURES = 32
# Programs and traces of one signature, by the numbers that the step reads on the host.
_MOST_SPECIALIZATIONS = 8

Step = Callable[[], Any]


@attrs.define(eq=False)
class CapturedStep:
    """A train, test or predict function, with its programs.

    Args:
        trainer: The model.
        name: The method of the model: "train_step" and so on.
        capture: Records, and makes programs.
        closures: What the function finds in its closure, if each call makes another function.
    """

    trainer: Any
    name: str
    capture: StepCapture[torch.Tensor]
    closures: Closures | None = None
    needs_values: bool = attrs.field(default=False, init=False)  # a large step of it failed without
    _called: ObservedCalls = attrs.field(factory=ObservedCalls, init=False)
    _entries: dict[Signature, CacheEntry] = attrs.field(factory=dict, init=False)
    _reports: Reports = attrs.field(
        default=attrs.Factory(lambda step: Reports(step.trainer, step.name), takes_self=True),
        init=False,
    )
    _steps: int = attrs.field(default=0, init=False)  # that had a program
    _last: LastRun | None = attrs.field(default=None, init=False)  # None after an eager step

    def __call__(
        self,
        step: Step,
        data: object,
        session: Session | None,
        mode: Hashable = None,
        follows: bool = False,
        left: float | None = math.inf,
        large: bool = False,
    ) -> Any:
        """Runs a step for the distributed batch `data`: by a program, or eagerly.

        Steps of another `mode` have other programs. If a step `follows`, no code of the user ran
        since the last one: if that was a run of the same program, its guard still holds. It is
        recorded if that pays for the steps that are `left`: with infinity at once, with None by
        the steps that have run. A `large` step is recorded at once, without values.
        """
        if large or self.capture.at_once or self.trainer.jit_compile is True:
            left = math.inf
        last, self._last = self._last, None
        is_eager = not self._is_wanted() or self._is_refused(data, session)
        if is_eager or (entry := self._entry(data, session, mode)) is None:
            return step()
        before = last.program if follows and last is not None and entry is last.entry else None
        if before is None:
            self._check_guard(entry, session)
        if self._is_eager(entry, left, large):
            return entry.run_eagerly(step)
        if entry.programs and self._is_audited():
            return self._audit(entry, step, local_tensors(data, session))
        replayed = entry.run(local_tensors(data, session)) if entry.programs else None
        if replayed is None:
            return self._record(entry, step, data, session, left, large)
        return self._outputs(entry, *replayed, before)

    @property
    def program_counts(self) -> StepCounts | None:
        """The counts of the program that ran last; None if the last step ran eagerly."""
        return None if self._last is None else self._last.program.counts

    def _is_eager(self, entry: CacheEntry, left: float | None, large: bool) -> bool:
        state = entry.progress.state
        if state is State.DEFERRED:
            entry.apply_event(Event.SKIPPED)
        if state is not State.NEW:
            return state is State.EAGER or (state is State.DEFERRED and not large)
        has_other = left != math.inf and bool(self._programs(entry.signature.kind))
        if entry.is_due(None if has_other else left, recordings=1 if has_other else 2):
            return False
        if not has_other:
            self._reports.report_postponement(entry.payback.needed)
        return True

    def _is_audited(self) -> bool:
        """Counts the step: all ranks audit the same one."""
        self._steps += 1
        return self.capture.audit_interval > 0 and self._steps % self.capture.audit_interval == 0

    def _audit(self, entry: CacheEntry, step: Step, tensors: Sequence[Any]) -> Any:
        """Runs the step eagerly in place of its program, and compares it with what was recorded."""
        outputs = self.capture.audit(step, tensors, entry.programs)
        entry.apply_event(Event.RAN)
        return outputs

    def run_again(self, tensors: Sequence[object]) -> Any:
        """Runs a program on the outputs of its last run; None if the step must be called.

        After a program has run twice in a row on its own outputs, only the numbers that it reads
        are compared. Its outputs may be inference tensors.

        Args:
            tensors: Local shards: of what the last step made, which nothing else holds, and which
                may be overwritten; then of the other tensors of its batch.
        """
        last = self._last
        if last is None or not last.fits_itself:
            return None
        replayed = last.entry.run(tensors, owner=last.program)
        return None if replayed is None else self._outputs(last.entry, *replayed, last.program)

    def _outputs(
        self, entry: CacheEntry, outputs: object, program: Program, before: Program | None
    ) -> Any:
        self._last = LastRun(entry, program, program is before)
        return outputs

    def _is_wanted(self) -> bool:
        jit = self.trainer.jit_compile
        if self.trainer.run_eagerly or self.capture.is_recording():
            return False  # a step within a step is part of it
        return jit is True or isinstance(jit, keras_private.Auto)

    def _is_refused(self, data: object, session: Session | None) -> bool:
        """Refuses a batch, a thread or a mode of torch that a program would not know."""
        reason = why_not_seen(data)
        if not reason and (mode := self.capture.active_mode()):  # no rank waits on another thread
            wait_for_new_trace(self._reports.step, f"the active mode of torch ({mode})", session)
            reason = f"{mode} is active, which a captured step would not call"
        if reason:  # of a batch, on all ranks: they compare what they distribute
            self._reports.report_refusal(reason)
        return bool(reason)

    def _entry(self, data: object, session: Session | None, mode: Hashable) -> CacheEntry | None:
        """Looks up the entry for batches like `data`, or makes one; None beyond a limit."""
        signature = Signature.of(data, session, (mode, self.trainer.training))
        if (entry := self._entries.get(signature)) is None:
            if len(self._entries) == _MOST_SIGNATURES:
                self._reports.report_refusal(
                    f"batches came in more than {_MOST_SIGNATURES} shapes: pad them"
                )
                return None
            state = State.DEFERRED if self._programs(signature.kind) else State.NEW
            entry = self._entries[signature] = CacheEntry(signature, Progress(state))
        return entry

    def _programs(self, kind: str) -> list[Program]:
        entries = [entry for signature, entry in self._entries.items() if signature.kind == kind]
        return [program for entry in entries for program in entry.programs]

    def _check_guard(self, entry: CacheEntry, session: Session | None) -> None:
        """Drops what was recorded while Python held something else."""
        change = None if entry.guard is None else entry.guard.change()
        if not change:
            return
        if entry.programs:
            wait_for_new_trace(self._reports.step, change.name, session)
        self._reports.report_change(change.name)
        self._called.forget()  # functions that were replaced run no more
        entry.apply_event(Event.CHANGED)
        if entry.progress.is_unstable:
            entry.unstable = f"{change.name} changes again and again: {_KEEP}"

    def _record(
        self,
        entry: CacheEntry,
        step: Step,
        data: Any,
        session: Session | None,
        left: float | None,
        large: bool,
    ) -> Any:
        """Records the step, and runs it; makes a program if it ran like that before."""
        # Either may be so on one rank alone, and a step that is recorded starts other collectives.
        unstable, profiled = zip(
            *gather_from_ranks((entry.unstable, is_profiled()), session), strict=True
        )
        if reason := next(filter(None, unstable), ""):
            self._refuse(entry, reason)
            return step()
        if any(profiled):
            entry.apply_event(Event.SKIPPED)
            return step()
        began = time.perf_counter()
        with without_collection():  # else it takes a quarter of the time
            with self._called.observe() as profile:
                donated = 0 if self.closures is None else len(local_tensors(data[0], None))
                tensors = local_tensors(data, session)
                recording = Recording(self, step, tensors, donated, large)
                trace = recording.record(profile)
            reason = self._refusal(entry, trace, session)

            def make(most: RecordedSums | None) -> Outcome:
                own = recording.with_program(self._outcome(entry, trace, reason, most), trace, most)
                is_first = own.event is Event.RECORDED and entry.progress.state is State.NEW
                is_worth = entry.payback.is_worth(left, time.perf_counter() - began)
                event = own.event if is_worth or not is_first else Event.POSTPONED
                return attrs.evolve(own, event=event, is_first=is_first)

            outcome = agree_on_outcome(make, trace, session)
        outputs = recording.outputs(outcome.event)
        self._reports.report_recording(time.perf_counter() - began)
        if outcome.event is Event.REFUSED:
            self._refuse(entry, outcome.reason)
            return outputs
        entry.apply_event(outcome.event)
        if outcome.event is Event.SKIPPED:
            self._called.forget()
        elif outcome.event is Event.POSTPONED:
            self._reports.report_postponement(entry.payback.needed)
        elif outcome.program is None:
            entry.traces[trace.numbers] = trace
        else:
            entry.traces.pop(trace.numbers, None)
            entry.programs.append(outcome.program)
            self.trainer.zero_grad()  # no later step overwrites the gradients of the eager ones
            self._reports.report_capture(self._called.effects(), outcome.program.remark)
        return outputs

    def _outcome(
        self, entry: CacheEntry, trace: StepTrace, reason: str, most: RecordedSums | None
    ) -> Outcome:
        # A module's body ran in this step alone: the next one shows the rest.
        if reason and self._called.has_imported:
            return Outcome(Event.SKIPPED)
        if reason:
            return Outcome(Event.REFUSED, reason=reason)
        make = partial(
            self.capture.program,
            trace=trace,
            compiled=self.trainer.jit_compile is True,
            all_reduces=most,
        )
        return entry.make_program(trace, self._programs(entry.signature.kind), make)

    def _refusal(self, entry: CacheEntry, trace: StepTrace, session: Session | None) -> str:
        """Finds why the recorded step cannot have a program; empty if it can.

        If it can, the guard has the present Python state.
        """
        if trace.refusal:
            return trace.refusal
        change = None if entry.guard is None else entry.guard.change()
        if change and change.is_new_attribute:
            entry.guard = None  # Keras makes some in the second step
        elif change:
            return f"{change.name} is changed by the step: {_KEEP}"
        local = (lambda tensor: tensor) if session is None else session.strategy.to_local
        try:
            if entry.guard is None or entry.guard.functions != self._called.count:
                entry.guard = PythonGuard.of(
                    self.trainer, self._called, self.capture, local, self.closures
                )
        except NotCaptured as refusal:
            return str(refusal)
        known = len(entry.traces) + len(entry.programs)
        if trace.numbers not in entry.traces and known == _MOST_SPECIALIZATIONS:
            return f"it reads other values on the host each time: {trace.last_read}: {_KEEP}"
        return ""

    def _refuse(self, entry: CacheEntry, reason: str) -> None:
        entry.apply_event(Event.REFUSED)
        self._reports.report_refusal(reason)
