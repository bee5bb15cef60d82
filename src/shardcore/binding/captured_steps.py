"""A step that is recorded, and from then on run without the Python that it is made of."""

import logging
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import attrs
import torch

from shardcore.binding import agreement, agreement_of_steps, seams, torch_modes
from shardcore.binding.held_state import HeldState
from shardcore.binding.session import Session
from shardcore.domain.capture import NotCaptured, OtherWay, StepsDiffer
from shardcore.ports.capture import Program, Recording, StepCapture

logger = logging.getLogger("shardcore.capture")

# Kinds of batches, by their shapes, that one function keeps programs for.
_MOST_SIGNATURES = 32
# How often a step is recorded anew because something that it looks at has changed.
_MOST_CHANGES = 8
# After more runs than these a change is one of its own, and not one of a row.
_FEW_RUNS = 20
# After so many runs a way that came once is forgotten: a recording holds copies of small tensors.
_MANY_RUNS = 1000
# How often two recordings may differ: a library plans its work once for each new shape.
_MOST_DIFFERENCES = 2
# How many ways a step goes, by what it reads on the host.
_MOST_WAYS = 8


@attrs.define
class _Attempt:
    """What is known of the step for batches of one kind.

    Args:
        recordings: Runs that were recorded once, by the numbers that they read on the host.
        held: What was held after the last of them.
        programs: The step, for each way that it goes.
        refused: Whether the step runs eagerly for good.
        changes: How often programs were given up, of late.
        runs: How often programs have run since.
        differences: How often a recording was not that of before.
    """

    recordings: dict[tuple[Any, ...], Recording] = attrs.field(factory=dict)
    held: HeldState | None = None
    programs: list[Program] = attrs.field(factory=list)
    refused: bool = False
    changes: int = 0
    runs: int = 0
    differences: int = 0

    def ran(self, program: Program) -> None:
        """The next step is most likely to go the same way: it is tried first."""
        self.runs += 1
        if self.runs % _MANY_RUNS == 0:
            self.recordings.clear()
        if program is not self.programs[0]:
            self.programs.remove(program)
            self.programs.insert(0, program)


@attrs.frozen
class _Runs:
    """What a step did that is to be captured.

    Args:
        first: In a run before, that read the same numbers; None if there was none.
        last: In the last run.
        was_held: What was held before that.
    """

    first: Recording | None
    last: Recording
    was_held: HeldState | None


@attrs.define(eq=False)
class CapturedStep:
    """The captured forms of one train, test or predict function.

    Args:
        trainer: The model.
        name: The method of the model: "train_step" and so on.
        capture: Records, and makes programs.
    """

    trainer: Any
    name: str
    capture: StepCapture
    _attempts: dict[str, _Attempt] = attrs.field(factory=dict, init=False)
    _told: set[str] = attrs.field(factory=set, init=False)

    def __call__(
        self, step: Callable[[], Any], data: Any, session: Session | None, mode: str = ""
    ) -> Any:
        """What `step` returns for the distributed batch `data`: a nest of plain tensors.

        It runs eagerly and is recorded twice; if both runs did the same, the next is the first
        that runs from the recording. Steps of another `mode` do other things.
        """
        attempt = self._attempt(data, session, mode) if self._is_wanted(data) else None
        if attempt is not None:
            self._give_up_changed(attempt, session)
        if attempt is None or attempt.refused:
            return step()
        for program in list(attempt.programs):
            if program.fits():
                with suppress(OtherWay), torch_modes.as_recorded():
                    outputs = program(_parts(data, session))
                    attempt.ran(program)
                    return outputs
        return self._recorded(attempt, step, data, session)

    def _is_wanted(self, data: Any) -> bool:
        """Whether `compile()` asked for it, and a step of the user's own was asked for by name."""
        asked = self.trainer.jit_compile
        if self.trainer.run_eagerly or threading.current_thread() is not threading.main_thread():
            return False
        if self.capture.is_recording():  # a step within a step is part of it
            return False
        if any(isinstance(each, torch.Tensor) and _is_told(each) for each in seams.leaves(data)):
            return False
        return asked is True or (
            isinstance(asked, seams.Auto) and not seams.is_own_step(self.trainer, self.name)
        )

    def _attempt(self, data: Any, session: Session | None, mode: str) -> _Attempt | None:
        """What is known for batches like `data`; None where the step runs eagerly."""
        signature = self._signature(data, session) + mode
        attempt = self._attempts.get(signature)
        if attempt is None:
            if len(self._attempts) == _MOST_SIGNATURES:
                self._tell(f"batches came in more than {_MOST_SIGNATURES} shapes")
                return None
            attempt = self._attempts[signature] = _Attempt()
        return attempt

    def _signature(self, data: Any, session: Session | None) -> str:
        """What programs are kept by: the nest of the batch with its shapes, dtypes, layouts."""
        seen: list[Any] = []

        def told(leaf: Any) -> Any:
            if not isinstance(leaf, torch.Tensor):
                return leaf
            layout = None if session is None else session.strategy.layout(leaf)
            same = next((n for n, each in enumerate(seen) if each is leaf), None)
            seen.append(leaf)
            form = tuple(leaf.shape), leaf.stride(), leaf.dtype, leaf.device, leaf.requires_grad
            return f"{form} {layout} {same}"

        nest = seams.map_leaves(told, data)
        mesh = None if session is None else session.mesh
        return f"{nest} {torch_modes.current()} {self.trainer.training} {mesh}"

    def _give_up_changed(self, attempt: _Attempt, session: Session | None) -> None:
        """Forget what was recorded while other things were held."""
        where = "" if attempt.held is None else attempt.held.change()
        if not where:
            return
        if attempt.programs and session is not None and session.mesh.size > 1:
            agreement.meet_changed(f"{self.name} of model {self.trainer.name!r}", where, session)
        logger.debug("%s of %r: %s has changed", self.name, self.trainer.name, where)
        attempt.programs, attempt.recordings, attempt.held = [], {}, None
        attempt.changes = 1 if attempt.runs > _FEW_RUNS else attempt.changes + 1
        attempt.runs = 0
        if attempt.changes > _MOST_CHANGES:
            self._refuse(attempt, f"{where} changes again and again")

    def _recorded(
        self, attempt: _Attempt, step: Callable[[], Any], data: Any, session: Session | None
    ) -> Any:
        """Run the step eagerly and record it; of the second recording make the program.

        All ranks make it, or none does.
        """
        outputs, recording = self.capture.record(step, _parts(data, session))
        was_held, attempt.held = attempt.held, self._held(session)
        runs = _Runs(attempt.recordings.get(recording.numbers), recording, was_held)
        try:
            program = self._agreed(attempt, runs, session)
        except NotCaptured as refusal:
            self._refuse(attempt, str(refusal))
            return outputs
        if program is None:
            attempt.recordings[recording.numbers] = recording
        else:
            del attempt.recordings[recording.numbers]
            self._keep(program, attempt)
        return outputs

    def _agreed(self, attempt: _Attempt, runs: _Runs, session: Session | None) -> Program | None:
        """The program of all ranks, None where none of them has one yet.

        What is decided by sizes may be decided otherwise by a rank with a part of another size:
        then all decide by those of the rank that has most.

        Raises:
            NotCaptured: If there can be none, on any rank.
        """
        sent: tuple[int, ...] | None = None
        while True:
            program, reason = None, ""
            try:
                program = self._program(attempt, runs, sent)
            except NotCaptured as refusal:
                reason = str(refusal)
            if agreement_of_steps.all_agree(reason, program, session):
                return program
            if sent is not None:
                raise NotCaptured(agreement_of_steps.DIFFERENT)
            sent = agreement_of_steps.most_sent(runs.last, session)

    def _held(self, session: Session | None) -> HeldState:
        local = _itself if session is None else session.strategy.local
        return HeldState.of(self.trainer, local)

    def _program(
        self, attempt: _Attempt, runs: _Runs, sent: tuple[int, ...] | None
    ) -> Program | None:
        """The program of a step that was recorded before; None of one that was not.

        Args:
            attempt: What is known of such steps.
            runs: What the step did.
            sent: The bytes by which the ranks decide; None if each decides by its own.

        Raises:
            NotCaptured: If there can be none.
        """
        assert attempt.held is not None
        if runs.last.refusal:
            raise NotCaptured(runs.last.refusal)
        if runs.was_held is not None and (where := runs.was_held.change()):
            raise NotCaptured(f"{where} is changed by the step")
        if hook := seams.hook_of(self.trainer, self.capture.hooks_of):
            raise NotCaptured(f"{hook} has a hook, which a captured step would not call")
        if runs.first is None:
            if len(attempt.recordings) + len(attempt.programs) == _MOST_WAYS:
                raise NotCaptured(f"it reads other values on the host each time: {runs.last.told}")
            return None
        try:
            program = self._made(runs.first, runs.last, sent)
        except StepsDiffer:
            attempt.differences += 1
            if attempt.differences > _MOST_DIFFERENCES:
                raise
            return None
        _check_kept(program, attempt.held)
        return program

    def _made(self, first: Recording, last: Recording, sent: tuple[int, ...] | None) -> Program:
        compiled = self.trainer.jit_compile is True
        began = time.perf_counter()
        program = self.capture.program(first, last, compiled=compiled, sent=sent)
        seconds = time.perf_counter() - began
        logger.debug("%s of %r became a program in %.1f s", self.name, self.trainer.name, seconds)
        return program

    def _keep(self, program: Program, attempt: _Attempt) -> None:
        """The next step that goes this way runs from `program`."""
        attempt.programs.append(program)
        self.trainer.zero_grad()  # gradients of the eager steps: nobody will overwrite them
        logger.debug("%s of %r is captured", self.name, self.trainer.name)
        if program.remark:
            logger.warning(
                "%s of model %r is captured, but not compiled as jit_compile=True asks: %s.",
                self.name,
                self.trainer.name,
                program.remark,
            )

    def _refuse(self, attempt: _Attempt, reason: str) -> None:
        attempt.refused, attempt.held = True, None
        attempt.programs, attempt.recordings = [], {}
        self._tell(reason)

    def _tell(self, reason: str) -> None:
        if reason in self._told:
            return
        self._told.add(reason)
        logger.warning(
            "%s of model %r is not captured, so it runs eagerly, with the same numbers: %s. "
            "To silence this: model.compile(jit_compile=False).",
            self.name,
            self.trainer.name,
            reason,
        )


def _check_kept(program: Program, held: HeldState) -> None:
    """What `program` reads and does not make is held by somebody, who would tell of another.

    Raises:
        NotCaptured: If it is not.
    """
    for tensor in program.kept:
        if not isinstance(tensor, torch.Tensor) or held.holds(tensor):
            continue
        if torch_modes.keeps_casts():
            raise NotCaptured(
                "autocast keeps what it has cast of a weight, which steps in the same scope read: "
                "use torch.autocast(..., cache_enabled=False)"
            )
        raise NotCaptured(
            f"it reads a tensor of shape {tuple(tensor.shape)} that no variable, torch module or "
            "attribute of a layer holds"
        )


def _is_told(tensor: torch.Tensor) -> bool:
    """Whether somebody wants the gradient of a batch, or it is sparse: no recording has either."""
    return tensor.requires_grad or tensor.layout is not torch.strided


def _itself(tensor: Any) -> Any:
    return tensor


def _parts(data: Any, session: Session | None) -> list[Any]:
    """The plain tensors of a batch, in order."""
    tensors = [leaf for leaf in seams.leaves(data) if isinstance(leaf, torch.Tensor)]
    if session is None:
        return tensors
    with torch.no_grad():
        return [session.strategy.local(each) for each in tensors]
