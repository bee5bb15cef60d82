"""The callback that saves checkpoints while a model is trained, and resumes from the latest.

It saves after steps, epochs or minutes, alike on all ranks.
"""

import os
import time
from pathlib import Path

import attrs
import keras

from shardcore.binding import keras_private
from shardcore.binding.checkpoints import state
from shardcore.binding.checkpoints.checkpoints import Checkpoints, SaveRequest, Saving
from shardcore.binding.checkpoints.loading import Restore
from shardcore.binding.keras_private.variables import tensor_of
from shardcore.binding.ranks.session import Sessions
from shardcore.binding.trainer_run import DataPosition, SavedPosition
from shardcore.domain.errors import CheckpointError
from shardcore.ports.checkpoints import Lease


@attrs.define
class Due:
    """The decision whether a checkpoint is due.

    Args:
        sessions: The sessions of this process.
        steps: Every how many steps, None for never.
        epochs: Every how many epochs; 1 if all three are None.
        minutes: Every how many minutes.

    Raises:
        CheckpointError: If one is not above 0.
    """

    sessions: Sessions
    steps: int | None
    epochs: int | None
    minutes: float | None
    _saved: float = attrs.field(factory=time.monotonic, init=False)
    _looked: tuple[int, float] = attrs.field(default=(0, 0.0), init=False)
    _look: int = attrs.field(default=0, init=False)  # the step of the next look at the clock

    def __attrs_post_init__(self) -> None:
        limits = {"steps": self.steps, "epochs": self.epochs, "minutes": self.minutes}
        for name, value in limits.items():
            if value is not None and value <= 0:
                raise CheckpointError(
                    f"Expected every_{name} above 0, got {value}.", got=str(value)
                )
        if all(value is None for value in limits.values()):
            self.epochs = 1

    def start(self, step: int) -> None:
        """Begins to count minutes, at `step`."""
        self._saved = time.monotonic()
        self._looked = step, self._saved
        self._look = step + 1

    def after_step(self, before: int, step: int) -> bool:
        """Tells whether one is due after `step`: several steps may have run since `before`."""
        by_steps = self.steps is not None and step // self.steps != before // self.steps
        return self._by_minutes(step) or by_steps

    def after_epoch(self, epochs: int) -> bool:
        """Tells whether a checkpoint is due; `epochs` counts those that have ended."""
        return self.epochs is not None and epochs % self.epochs == 0

    def _by_minutes(self, step: int) -> bool:
        """Asks whether the minutes are over on the clock of rank 0. A collective at some steps.

        The ranks look together, after half of the steps that the rest of the minutes may take.
        """
        if self.minutes is None or step < self._look:
            return False
        now = time.monotonic()
        rest = self._saved + 60 * self.minutes - now
        steps = max(step - self._looked[0], 1)
        later = int(rest * steps / max(now - self._looked[1], 1e-6) / 2)
        session = self.sessions.current()
        is_due, wait = rest <= 0, max(later, 1)
        if session is not None:
            is_due, wait = session.processes.gather((is_due, wait))[0]
        self._looked, self._look = (step, now), step + wait
        if is_due:
            self.start(step)
        return bool(is_due)


@attrs.define(eq=False)
class _Progress:
    """The progress of a fit: the steps in all, the epoch that runs, the steps of this epoch."""

    step: int = 0
    epoch: int = 0
    of_epoch: int = 0


class CheckpointCallback(keras.callbacks.Callback):  # type: ignore[misc]
    """The callback `shardcore.ShardedCheckpoint`, with the services that it uses.

    Saves sharded checkpoints while `fit` runs, and lets it go on where the latest one ends.
    """

    comes_last = True  # it saves the states of the other callbacks

    def __init__(
        self,
        checkpoints: Checkpoints,
        directory: str | os.PathLike[str],
        due: Due,
        keep: int | None,
        asynchronous: bool,
        resume: bool,
    ) -> None:
        super().__init__()
        self.checkpoints = checkpoints
        self.directory = directory
        self.due = due
        self.keep = keep
        self.asynchronous = asynchronous
        self.resume = resume
        self._progress = _Progress()
        self._position = DataPosition()
        self._saving: Saving | None = None
        self._restore: Restore | None = None
        self._lease: Lease | None = None
        self._is_due = False
        self._saved_step: int | None = None

    def on_train_begin(self, logs: object = None) -> None:
        """Loads the latest checkpoint, and lets the fit begin at its epoch."""
        self._progress, self._position = _Progress(), DataPosition()
        self._saved_step = None
        run = self.checkpoints.sessions.run()
        if run is None:
            raise CheckpointError("ShardedCheckpoint belongs into the callbacks of model.fit().")
        run.position = self._position
        self._lease = self.checkpoints.lease(self.directory)
        run.at_end.callback(self._release)
        latest = self.checkpoints.latest(self.directory) if self.resume else None
        if latest is not None:
            self._restore = self.checkpoints.load(latest, self.model)
            self._resume(self._restore)
        self.due.start(self._progress.step)

    def _resume(self, restore: Restore) -> None:
        training = restore.index.state.get("training")
        if training is None:
            raise CheckpointError(
                f"Checkpoint {str(restore.path)!r} was not saved by ShardedCheckpoint, so it has "
                "no epoch to go on at: give another directory, or resume=False after "
                "shardcore.load_checkpoint().",
                name=str(restore.path),
            )
        saved = training["place"]
        self._position.ahead = None if saved is None else SavedPosition.from_json(saved)
        self._progress = _Progress(restore.index.step, training["epoch"], training["of_epoch"])
        keras_private.begin_at(self.model, training["epoch"])
        if training["of_epoch"]:
            values = [(v, tensor_of(v).detach().clone()) for v in self.model.metrics_variables]
            self._position.metrics = values

    def on_epoch_begin(self, epoch: int, logs: object = None) -> None:
        """Restores at the first epoch what Keras has reset."""
        if self._restore is None:
            self._progress.of_epoch = 0
        else:
            callbacks = self._others()
            states = self._restore.index.state["training"]["callbacks"]
            state.restore_callbacks(callbacks, states, self._restore.arrays)
        self._restore = None
        self._progress.epoch = epoch

    def on_train_batch_end(self, batch: int, logs: object = None) -> None:
        """Saves if it is due; after the last step of an epoch at its end."""
        before, steps_done = self._progress.step, batch + 1
        self._progress.step += steps_done - self._progress.of_epoch
        self._progress.of_epoch = steps_done
        self._is_due = self.due.after_step(before, self._progress.step) or self._is_due
        is_last = steps_done >= (self.params.get("steps") or steps_done + 1)
        if self._is_due and not is_last:
            self._save()

    def on_epoch_end(self, epoch: int, logs: object = None) -> None:
        """Saves if it is due."""
        self._progress.epoch, self._progress.of_epoch = epoch + 1, 0
        if self.due.after_epoch(epoch + 1) or self._is_due:
            self._save()

    def on_train_end(self, logs: object = None) -> None:
        """Waits until the last checkpoint is complete."""
        keras_private.begin_at(self.model, None)
        self._release()  # the save that is under way has it until it ends
        self.finish()

    def save_here(self) -> None:
        """Saves and completes a checkpoint of this step, unless there is one. A collective."""
        if self._saved_step != self._progress.step:
            self._save()
        self.finish()

    def finish(self) -> None:
        """Waits until the checkpoint that is being written is complete. A collective.

        Raises:
            CheckpointError: If it cannot be completed; on all ranks.
            OSError: If a rank cannot write; on all ranks.
        """
        saving, self._saving = self._saving, None
        if saving is not None:
            saving.finish()

    def _release(self) -> None:
        lease, self._lease = self._lease, None
        if lease is not None:
            lease.release()

    def _save(self) -> None:
        self.finish()
        self._is_due, self._saved_step = False, self._progress.step
        session = self.checkpoints.sessions.current()
        states, arrays = state.callback_states(self._others(), session)
        saved = self._position.saved(self._progress.of_epoch)
        if not (self._progress.of_epoch or self._position.goes_on):
            saved = None  # the epoch makes a new iterator of the data
        training = {
            "epoch": self._progress.epoch,
            "of_epoch": self._progress.of_epoch,
            "place": None if saved is None else saved.to_json(),
            "callbacks": states,
        }
        request = SaveRequest(
            Path(self.directory).absolute(),
            self.model,
            self._progress.step,
            {"training": training},
            self.keep,
            arrays,
            self._lease,
        )
        self._saving = self.checkpoints.begin(request)
        if not self.asynchronous:
            self.finish()

    def _others(self) -> list[keras.callbacks.Callback]:
        run = self.checkpoints.sessions.run()
        callbacks = [] if run is None or run.callbacks is None else run.callbacks.callbacks
        return [callback for callback in callbacks if callback is not self]
