"""Messages about a captured step: that it is captured, slow to record, or eager, and why."""

from collections.abc import Sequence
from typing import Any

import attrs

from shardcore.reporting.logs import log_of

logger = log_of("capture")

# A recording that takes longer than this (seconds) logs what it does.
PATIENCE = 2.0


@attrs.define(eq=False)
class Reports:
    """Says each message about one step of a model once.

    Args:
        trainer: The model.
        name: The method of the model: "train_step" and so on.
    """

    trainer: Any
    name: str
    _seconds: float = attrs.field(default=0.0, init=False)
    _said: set[str] = attrs.field(factory=set, init=False)

    @property
    def step(self) -> str:
        """The step, for errors of several ranks."""
        return f"{self.name} of model {self.trainer.name!r}"

    def report_recording(self, seconds: float) -> None:
        """Logs once that recording takes long, after a step of `seconds`; Inductor logs itself."""
        before, self._seconds = self._seconds, self._seconds + seconds
        if before <= PATIENCE < self._seconds and self.trainer.jit_compile is not True:
            logger.info(
                "%s: its first steps are recorded, in %.1f s so far; the next ones run "
                "from the trace. SHARDCORE_LOG=capture tells more.",
                self.step,
                self._seconds,
            )

    def report_change(self, change: str) -> None:
        """Logs that a change of Python state drops the programs."""
        logger.debug("%s of %r: %s has changed", self.name, self.trainer.name, change)

    def report_postponement(self, needed: int) -> None:
        """Logs once that steps run eagerly until `needed` of them make recording pay."""
        text = f"recording pays from {needed} steps on; SHARDCORE_CAPTURE=at-once does not wait"
        if self._is_new(text):
            logger.debug("%s of %r runs eagerly: %s", self.name, self.trainer.name, text)

    def report_capture(self, effects: Sequence[str], remark: str) -> None:
        """Logs that the step has a program, which does not repeat `effects`."""
        logger.debug("%s of %r is captured: %.1f s", self.name, self.trainer.name, self._seconds)
        if effects and self._is_new("effects"):
            logger.info(
                "%s is captured: its Python does not run again, so its %s are not repeated.",
                self.step,
                " and ".join(effects),
            )
        if remark:
            logger.warning(
                "%s is captured, but not compiled as jit_compile=True asks: %s.",
                self.step,
                remark,
            )

    def report_refusal(self, reason: str) -> None:
        """Warns once that the step runs eagerly."""
        if self._is_new(reason):
            logger.warning(
                "%s is not captured, so it runs eagerly, with the same numbers: %s. "
                "To silence this: model.compile(jit_compile=False).",
                self.step,
                reason,
            )

    def _is_new(self, text: str) -> bool:
        is_new = text not in self._said
        self._said.add(text)
        return is_new
