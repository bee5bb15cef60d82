"""Metrics whose results of single steps no callback reads, so that they are deferred."""

from collections.abc import Callable
from typing import Any

import attrs

from shardcore.binding import seams


@attrs.frozen(eq=False)
class DeferredMetrics:
    """The metrics of a model whose step results are first read at the end of the epoch."""

    trainer: Any
    states: tuple[Any, ...]  # the variables of the metrics

    def __contains__(self, variable: Any) -> bool:
        return any(each is variable for each in self.states)


class DeferredLogs(dict[str, Any]):
    """The logs of a step whose metrics are deferred."""


@attrs.define(eq=False)
class TrainerRun:
    """A running fit, evaluate, predict or step of `trainer`.

    Args:
        trainer: The model.
        callbacks: The callbacks of its steps, after their begin, as Keras lists them.
        phase: The steps that the callbacks see: "train" or "test".
        deferred: Its deferred metrics, if no rank reads the results of single steps.
    """

    trainer: Any
    callbacks: Any = None
    phase: str = ""
    deferred: DeferredMetrics | None = None

    def is_read(self) -> bool:
        """Returns whether a callback on this rank may read the model between two steps."""
        return (
            self.callbacks is None
            or seams.gives_own_logs(self.trainer, f"{self.phase}_step")
            or seams.read_steps(self.callbacks, self.phase)
        )

    def agree(self, is_read: bool) -> None:
        """Defers the metrics of the epoch that begins, unless a rank reads them: `is_read`."""
        states = () if is_read else tuple(self.trainer.metrics_variables)
        self.deferred = DeferredMetrics(self.trainer, states) if states else None


def results_of_epoch(original: Callable[..., Any], trainer: Any, logs: Any) -> Any:
    """Replaces `Trainer._get_metrics_result_or_logs`: deferred results come from the metrics."""
    return (
        trainer.get_metrics_result() if isinstance(logs, DeferredLogs) else original(trainer, logs)
    )
