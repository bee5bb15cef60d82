"""Steps with large outputs: they are recorded without values, and run by programs only (ADR 60).

A program computes the outputs of a model, their loss and their gradients in slices. An eager step
would hold them whole, and its peak is that of the whole fit.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import attrs
import keras
import torch

from shardcore.binding import keras_private
from shardcore.binding.capture.agreement import Outcome
from shardcore.binding.capture.signatures import below_autocast
from shardcore.binding.ranks.session import Session
from shardcore.domain.capture import LARGE_VALUE, Event, NotCaptured
from shardcore.ports.capture import Observer, Program, RecordedSums, StepCapture, StepTrace
from shardcore.reporting.logs import log_of

logger = log_of("capture")

_STEPS = ("train_step", "test_step")


class CapturedFunction(Protocol):
    """A train or test function: `CapturedStep`."""

    trainer: Any
    name: str
    capture: StepCapture[torch.Tensor]
    needs_values: bool


def is_large(captured: CapturedFunction, batch: object, session: Session | None) -> bool:
    """Tells whether an output of a model has `LARGE_VALUE` bytes on a rank, or more.

    Args:
        captured: The function. Only a model whose outputs are known, as those of a functional model
            are, and that is built with its optimizer, can be large. Outputs of a step of the user,
            and of `predict`, are needed whole.
        batch: The batch of the step.
        session: The session; None on one device.
    """
    trainer, name = captured.trainer, captured.name
    if captured.needs_values or name not in _STEPS:
        return False
    outputs = getattr(trainer, "outputs", None)
    if not outputs or not all(isinstance(output, keras.KerasTensor) for output in outputs):
        return False
    if keras_private.is_own_step(trainer, name):
        return False
    # Most models: an output of fewer than 64 numbers for a row would need some 260,000 rows to be
    # large. It stays whole.
    if all(_elements(output.shape, ()) * 2**20 < LARGE_VALUE for output in outputs):
        return False
    optimizer = getattr(trainer, "optimizer", None)
    if not trainer.built or (name == "train_step" and not getattr(optimizer, "built", False)):
        return False
    tensors = [leaf for leaf in keras_private.leaves(batch) if isinstance(leaf, torch.Tensor)]
    if not tensors:
        return False
    sizes = _sizes_on_first_rank(tensors[0], session)
    return any(
        _elements(output.shape, sizes) * getattr(torch, output.dtype).itemsize >= LARGE_VALUE
        for output in outputs
    )


def _sizes_on_first_rank(tensor: torch.Tensor, session: Session | None) -> tuple[int, ...]:
    """Reads the local shape of the first rank, the largest: all ranks come to the same answer."""
    layout = None if session is None else session.strategy.layout(tensor)
    shape = tuple(tensor.shape)
    return shape if layout is None else layout.local_shape(shape, 0)


def _elements(shape: Sequence[int | None], sizes: Sequence[int]) -> int:
    """Counts elements; dims of unknown size have those of the batch in their place, else 1."""
    known = (*sizes, *[1] * len(shape))
    return math.prod(known[dim] if size is None else size for dim, size in enumerate(shape))


@attrs.define(eq=False)
class Recording:
    """A step that is recorded: eagerly, or without values and then run by a program.

    Args:
        captured: The function of the step.
        step: The step.
        tensors: The local shards of its batch.
        donated: The number of the first of them that the first results replace.
        without_values: Whether it is recorded without values.
    """

    captured: CapturedFunction
    step: Callable[[], Any]
    tensors: Sequence[torch.Tensor]
    donated: int
    without_values: bool
    _outputs: Any = attrs.field(default=None, init=False)
    _program: Program | None = attrs.field(default=None, init=False)
    # Why this rank cannot run it without values; else another rank has a reason.
    _reason: str = attrs.field(default="so does another rank", init=False)

    def record(self, observer: Observer) -> StepTrace:
        """Records the step."""
        if not self.without_values:
            self._outputs, trace = self.captured.capture.record(
                self.step, self.tensors, observer, self.donated
            )
            return trace
        trace = self.captured.capture.record_without_values(self.step, self.tensors, observer)
        self.captured.trainer.zero_grad()  # its gradients have no values
        return trace

    def with_program(
        self, outcome: Outcome, trace: StepTrace, all_reduces: RecordedSums | None
    ) -> Outcome:
        """Makes the program that runs a step of which nothing ran yet."""
        if not self.without_values:
            return outcome
        if outcome.event in (Event.REFUSED, Event.SKIPPED):
            self._reason = outcome.reason or self._reason
            return Outcome(Event.SKIPPED)  # with values, the next one may be captured
        try:
            with below_autocast():
                self._program = outcome.program or self.captured.capture.program(
                    None, trace, all_reduces=all_reduces
                )
        except NotCaptured as refusal:
            self._reason = str(refusal)
            return Outcome(Event.REFUSED, reason=self._reason)
        return outcome

    def outputs(self, event: Event) -> Any:
        """Returns the result of the step, which runs now if it was recorded without values.

        Args:
            event: The outcome on which all ranks agree.
        """
        if not self.without_values:
            return self._outputs
        if event in (Event.REFUSED, Event.SKIPPED):
            self.captured.needs_values = True
            name, model = self.captured.name, self.captured.trainer.name
            logger.info("%s of model %r holds its outputs whole: %s", name, model, self._reason)
            return self.step()
        assert self._program is not None, "a rank whose step is refused refuses it on all"
        with below_autocast():
            return self._program(self.tensors)
