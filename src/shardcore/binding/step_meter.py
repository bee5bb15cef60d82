"""The meter of a running fit or evaluate: what its steps take, in windows and in all."""

import math
from collections.abc import Callable, Hashable
from typing import Any

import attrs
import keras

from shardcore.binding import keras_private
from shardcore.domain.cost.step_figures import StepCounts, StepTotals
from shardcore.ports.measurement import StepMeasure

Step = Callable[[], Any]
RunStep = Callable[[Step], Any]


@attrs.frozen
class _Timed:
    """A step that has started its work: its marks, and the seconds of the host for its batch."""

    begin: Any
    end: Any
    drawing: float


@attrs.define(eq=False)
class StepMeter:
    """Measures steps, without collectives.

    Only the end of a window waits for the device. Other threads may read `figures`.

    Args:
        measure: Measures on the device.
        every: The steps of a window; the first one has one step, so that there are figures.
        dtype: The dtype in which most of the model computes.
        seconds_of_drawing: The seconds of the host that all batches so far took.

    Attributes:
        figures: The means of the last window.
    """

    measure: StepMeasure[Any]
    every: int
    dtype: str
    seconds_of_drawing: Callable[[], float]
    figures: dict[str, float] = attrs.field(factory=dict, init=False)
    _by_shapes: dict[Hashable, StepCounts] = attrs.field(factory=dict, init=False)  # of eager steps
    _window: list[_Timed] = attrs.field(factory=list, init=False)
    _counts: StepTotals = attrs.field(factory=StepTotals, init=False)  # of the window, untimed
    _epoch: StepTotals = attrs.field(factory=StepTotals, init=False)
    _last: Any = attrs.field(default=None, init=False)  # the mark at which the window begins
    _drawn: float = attrs.field(default=0.0, init=False)

    def begin(self) -> None:
        """Begins an epoch: what ran before does not count."""
        self._epoch, self._last = StepTotals(), self.measure.mark()
        self._drawn = self.seconds_of_drawing()

    def end(self) -> dict[str, float]:
        """Ends an epoch, and gives the means of its steps; empty without one."""
        self._close_window()
        return self._figures(self._epoch) if self._epoch.steps else {}

    def run(
        self,
        run_step: RunStep,
        step: Step,
        batch: list[object],
        program_counts: Callable[[], StepCounts | None],
    ) -> Any:
        """Runs a step, and closes the window if this is its last one.

        Args:
            run_step: Runs the step, or its program.
            step: The step; the first one with such a batch is counted, operator by operator.
            batch: The batches of the step, of global shapes.
            program_counts: The counts of the program that ran in place of the step.
        """
        tensors = [leaf for leaf in keras_private.leaves(batch) if hasattr(leaf, "shape")]
        shapes = tuple(tuple(tensor.shape) for tensor in tensors)
        counts: StepCounts | None = None

        def counted() -> Any:
            nonlocal counts
            if shapes in self._by_shapes:
                outputs = step()
            else:
                with self.measure.counting() as counter:
                    outputs = step()
                self._by_shapes[shapes] = counter.counts
            counts = self._by_shapes[shapes]
            return outputs

        begin = self.measure.mark()
        outputs = run_step(counted)
        drawn = self.seconds_of_drawing()
        self._window.append(_Timed(begin, self.measure.mark(), drawn - self._drawn))
        self._drawn = drawn
        counts = counts or program_counts() or StepCounts()
        samples, tokens = shapes[0][0] if shapes and shapes[0] else 0, _tokens(batch)
        self._counts += StepTotals(
            1, 0.0, 0.0, samples, tokens, counts.collective_bytes, counts.flops
        )
        if not self.figures or len(self._window) == self.every:
            self.figures = self._figures(self._close_window())
        return outputs

    def _close_window(self) -> StepTotals:
        before, first, waited = self._last, self._last, 0.0
        for step in self._window:
            waited += min(step.drawing, self.measure.seconds(before, step.begin))
            before = step.end
        seconds = self.measure.seconds(first, before)
        totals = attrs.evolve(self._counts, seconds=seconds, waited=waited)
        self._last, self._window, self._counts = before, [], StepTotals()
        self._epoch += totals
        return totals

    def _figures(self, totals: StepTotals) -> dict[str, float]:
        peak = self.measure.peak_flops(self.dtype)
        return totals.figures(self.measure.peak_memory(), peak)


def _tokens(batch: list[object]) -> int:
    """Counts the elements of the largest integer input with two dims; 0 without one."""
    inputs, _, _ = keras.utils.unpack_x_y_sample_weight(batch[0])
    integers = [x for x in keras_private.leaves(inputs) if "int" in str(getattr(x, "dtype", ""))]
    return max((math.prod(x.shape) for x in integers if len(x.shape) == 2), default=0)
