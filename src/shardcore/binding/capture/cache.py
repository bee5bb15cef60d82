"""The programs of a step, by what its batches have in common."""

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import attrs
import torch

from shardcore.binding import keras_private
from shardcore.binding.capture import torch_modes
from shardcore.binding.capture.python_state.guard import PythonGuard
from shardcore.binding.ranks.session import Session
from shardcore.domain.capture import Event, GuardFailed, Payback, Progress, State
from shardcore.ports.capture import Program, StepTrace

# Traces without a program are dropped after this many runs: they hold copies of small tensors.
_MANY_RUNS = 1000


@attrs.frozen
class Signature:
    """The key of the cache: batches with equal signatures share programs.

    Args:
        kind: The nesting and dtypes of the batch, and the modes in which the steps run.
        sizes: The shapes, strides and layouts of their tensors.
    """

    kind: str
    sizes: tuple[Any, ...]

    @classmethod
    def of(cls, data: object, session: Session | None, mode: Any) -> "Signature":
        """Returns the signature of a batch.

        Args:
            data: The batch, a nest of tensors.
            session: The session of the step; None on one device.
            mode: In what the step differs from others with the same batch.
        """
        seen: list[Any] = []
        sizes: list[Any] = []

        def kind_of(leaf: object) -> Any:
            if not isinstance(leaf, torch.Tensor):
                return leaf
            layout = None if session is None else session.strategy.layout(leaf)
            sizes.append((tuple(leaf.shape), leaf.stride(), str(layout)))
            same = next((n for n, earlier in enumerate(seen) if earlier is leaf), None)
            seen.append(leaf)
            return f"{leaf.ndim} {leaf.dtype} {leaf.device} {leaf.requires_grad} {same}"

        nest = keras_private.map_leaves(kind_of, data)
        mesh = None if session is None else session.mesh
        modes = torch_modes.current(), keras_private.settings(), mode
        return cls(f"{nest} {modes} {mesh}", tuple(sizes))


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
        payback: The eager steps, and from when on recording one pays.
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
        """Returns whether the step is recorded, now that it has no trace.

        Once it was, it is again until all ranks postpone it: Python state may change on one rank
        alone, which begins again while the others record their second step.

        Args:
            left: The steps that are left; None if that is unknown.
            recordings: The recorded steps that a program takes.
        """
        self._was_due = self._was_due or self.payback.is_due(left, recordings)
        return self._was_due

    def run_eagerly(self, step: Callable[[], Any]) -> Any:
        """Returns what `step` returns, and notes its time."""
        began = time.perf_counter()
        outputs = step()
        self.payback = self.payback.after(time.perf_counter() - began)
        return outputs

    def run(
        self, tensors: Sequence[object], owner: Program | None = None
    ) -> tuple[Any, Program] | None:
        """Returns the outputs of the program whose guards hold, and the program; None without.

        `owner` may overwrite the tensors: it has made them, and nothing else holds them.
        """
        for program in list(self.programs):
            with suppress(GuardFailed), torch_modes.as_recorded():
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
