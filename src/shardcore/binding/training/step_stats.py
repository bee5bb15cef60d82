"""The callback that adds figures of the steps to the logs."""

from typing import Any

import keras

from shardcore.binding.ranks.session import Sessions
from shardcore.binding.step_meter import StepMeter
from shardcore.domain.cost.step_figures import STEP_FIGURES
from shardcore.domain.errors import ArgumentProblem, CallProblem
from shardcore.ports.measurement import StepMeasure


class StepStatsCallback(keras.callbacks.Callback):  # type: ignore[misc]
    """The callback `shardcore.StepStats`, with the services that it uses."""

    comes_first = True  # the others show what it adds
    async_safe = True  # on other threads it only copies the figures of the last window

    def __init__(self, sessions: Sessions, measure: StepMeasure[Any], every: int) -> None:
        super().__init__()
        if not isinstance(every, int) or isinstance(every, bool) or every < 1:
            raise ArgumentProblem(
                name="StepStats(every)", expected="a number of steps, from 1 on", got=repr(every)
            )
        self.sessions = sessions
        self.measure = measure
        self.every = every
        self._meter: StepMeter | None = None
        self._fit: object = None

    def on_train_begin(self, logs: object = None) -> None:
        """Begins to measure the steps of a fit."""
        self._fit = self.sessions.run()
        self._open()
        self._refuse_decisions()

    def on_epoch_begin(self, epoch: int, logs: object = None) -> None:
        """Begins an epoch."""
        self._opened().begin()

    def on_train_batch_end(self, batch: int, logs: dict[str, float] | None = None) -> None:
        """Adds the figures of the last window."""
        self._add(self._opened().figures, logs)

    def on_epoch_end(self, epoch: int, logs: dict[str, float] | None = None) -> None:
        """Adds the means of the epoch."""
        self._add(self._opened().end(), logs)

    def on_test_begin(self, logs: object = None) -> None:
        """Begins to measure the steps of an evaluate, but not those of a fit's validation."""
        if not self._is_in_fit:
            self._open()
            self._opened().begin()

    def on_test_batch_end(self, batch: int, logs: dict[str, float] | None = None) -> None:
        """Adds the figures of the last window."""
        if not self._is_in_fit:
            self._add(self._opened().figures, logs)

    def on_test_end(self, logs: dict[str, float] | None = None) -> None:
        """Adds the means of all steps."""
        if not self._is_in_fit:
            self._add(self._opened().end(), logs)

    @property
    def _is_in_fit(self) -> bool:
        """Whether the fit still runs: one that was interrupted has no end."""
        return any(run is self._fit for run in self.sessions.runs)

    def _refuse_decisions(self) -> None:
        """Raises if a callback decides by a figure: each rank measures another one."""
        run = self.sessions.run()
        if run is None or run.callbacks is None or self.sessions.shared() is None:
            return
        for callback in run.callbacks.callbacks:
            monitor = getattr(callback, "monitor", None)
            if monitor in STEP_FIGURES:
                name = type(callback).__name__
                raise CallProblem(
                    f"{name}(monitor={monitor!r}) would decide by what each rank measures by "
                    "itself, so otherwise on each rank. Monitor a loss or a metric; or decide in "
                    "a callback of your own, by shardcore.agree(..., 'rank 0')."
                )

    def _open(self) -> None:
        run = self.sessions.run()
        if run is None:
            raise CallProblem(
                "StepStats measures fit() and evaluate(): pass it in their callbacks=[...]."
            )
        prefetch, dtype = run.prefetch, run.trainer.compute_dtype
        self._meter = run.meter = StepMeter(
            self.measure, self.every, dtype, lambda: prefetch.seconds
        )

    def _opened(self) -> StepMeter:
        assert self._meter is not None, "a run begins before its steps"
        return self._meter

    @staticmethod
    def _add(figures: dict[str, float], logs: dict[str, float] | None) -> None:
        if logs is not None:
            logs.update(figures)
