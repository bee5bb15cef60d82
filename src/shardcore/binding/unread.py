"""Steps whose results nobody reads: who would, and what such a step returns."""

from collections.abc import Callable
from functools import wraps
from typing import Any

import attrs

from shardcore.binding import seams


@attrs.frozen(eq=False)
class Unread:
    """A model of which nobody reads the results of a step before an epoch is through.

    Args:
        trainer: The model.
        states: The variables of its metrics.
    """

    trainer: Any
    states: tuple[Any, ...]

    def __contains__(self, variable: Any) -> bool:
        return any(each is variable for each in self.states)


class NoLogs(dict[str, Any]):
    """The results of a step that were not worked out."""


@attrs.define(eq=False)
class Run:
    """A fit, evaluate, predict or step of `trainer` that is at work.

    Args:
        trainer: The model.
        callbacks: Of its steps, once they have begun, as Keras lists them.
        phase: The steps that the callbacks see: "train" or "test".
        unread: Its results, if no rank reads those of single steps.
    """

    trainer: Any
    callbacks: Any = None
    phase: str = ""
    unread: Unread | None = None

    def is_read(self) -> bool:
        """Whether something on this rank may look at the model between two steps."""
        return (
            self.callbacks is None
            or seams.gives_own_logs(self.trainer, f"{self.phase}_step")
            or seams.read_steps(self.callbacks, self.phase)
        )

    def agree(self, is_read: bool) -> None:
        """Be read, or unread, in the epoch that begins.

        Args:
            is_read: Whether it is, on any rank.
        """
        states = () if is_read else tuple(self.trainer.metrics_variables)
        self.unread = Unread(self.trainer, states) if states else None


def results_of_epoch(original: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    """`Trainer._get_metrics_result_or_logs`: the metrics have what the last step has not told."""

    @wraps(original)
    def _get_metrics_result_or_logs(trainer: Any, logs: Any) -> Any:
        if isinstance(logs, NoLogs):
            return trainer.get_metrics_result()
        return original(trainer, logs)

    return _get_metrics_result_or_logs
