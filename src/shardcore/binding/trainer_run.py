"""A running fit, evaluate, predict or step: its callbacks, its place in the data, who reads it."""

from contextlib import ExitStack

import attrs
from keras import Model, Variable
from keras.callbacks import CallbackList

from shardcore.binding import keras_private
from shardcore.binding.data_position import DataPosition
from shardcore.binding.prefetch import Prefetch


@attrs.define(eq=False)
class TrainerRun:
    """A running fit, evaluate, predict or step of `trainer`."""

    trainer: Model
    callbacks: CallbackList | None = None  # those of its steps, after their begin
    phase: str = ""  # the steps that the callbacks see: "train", "test" or "predict"
    # The variables of its metrics, if no rank reads the results of single steps.
    deferred: tuple[Variable, ...] = ()
    initial_epoch: int = 0  # the argument of a fit
    position: DataPosition | None = None  # in the data of a fit, if a callback saves it
    prefetch: Prefetch = attrs.field(factory=Prefetch, init=False)  # of its batches
    at_end: ExitStack = attrs.field(factory=ExitStack, init=False)  # closed as the run ends
    is_stopped: bool = False  # whether this rank has set `stop_training`, and all have met
    ends_after: int | None = None  # the steps of the epoch that are done where SIGTERM ends it
    # Whether no code of the user runs between the steps of an epoch; and its steps until now.
    is_undisturbed: bool = False
    steps: int = 0
    batches: int | None = None  # of an epoch; None if their number is unknown
    epochs_left: int = 0  # after this one

    def begin_epoch(self, is_undisturbed: bool) -> None:
        """Begins an epoch: code of the user may have run before it."""
        self.is_undisturbed, self.steps = is_undisturbed, 0
        self.epochs_left = max(self.epochs_left - 1, 0)

    def steps_left(self) -> int | None:
        """Returns the steps that are left, the one that runs included; None if unknown."""
        if self.batches is None or self.prefetch.left is None:
            return None
        return 1 + self.prefetch.left + self.epochs_left * self.batches

    def follows(self) -> bool:
        """Returns whether no code of the user ran between the last step and this one."""
        self.steps += 1
        return self.is_undisturbed and self.steps > 1

    def is_read(self) -> bool:
        """Returns whether a callback on this rank may read the model between two steps."""
        return (
            self.callbacks is None
            or self.phase == "predict"  # which updates no metrics
            or keras_private.gives_own_logs(self.trainer, f"{self.phase}_step")
            or keras_private.read_steps(self.callbacks, self.phase)
        )

    def agree(self, is_read: bool) -> None:
        """Defers the metrics of the epoch that begins, unless a rank reads them: `is_read`."""
        self.deferred = () if is_read else tuple(self.trainer.metrics_variables)
