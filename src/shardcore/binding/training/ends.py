"""Patches: the list of callbacks: points of a `fit` that all ranks pass, and may end at (ADR 54).

After SIGTERM to one rank all ranks save at one of them, and end. A rank that ends its `fit` alone,
by `stop_training`, is found there.
"""

import attrs
from keras.callbacks import CallbackList

from shardcore.binding import keras_private
from shardcore.binding.keras_private.patches import replaces
from shardcore.binding.ranks.session import Sessions
from shardcore.binding.trainer_run import TrainerRun
from shardcore.binding.training import loggers
from shardcore.binding.types import Original


@attrs.frozen
class Ends:
    """The methods of a list of callbacks, after each of which the ranks are at the same point."""

    sessions: Sessions

    @replaces(
        "keras.src.callbacks.callback_list:CallbackList.on_train_begin",
        "keras.src.callbacks.callback_list:CallbackList.on_test_begin",
        "keras.src.callbacks.callback_list:CallbackList.on_predict_begin",
        reason="Only this list has the callbacks, which may read the results of each step.",
    )
    def begin(
        self, name: str, original: Original, callbacks: CallbackList, logs: object = None
    ) -> None:
        """Replaces `CallbackList.on_train_begin` and `on_test_begin`, at which a run begins."""
        run = self.sessions.run()
        _, phase, _ = name.split("_")
        if run is not None:
            run.callbacks, run.phase = callbacks, phase
            keras_private.sort_callbacks(callbacks)
            if phase == "train":
                self._compare_loggers(run, callbacks)
        original(callbacks, logs)
        if run is not None and phase == "train":
            first = keras_private.first_epoch(run.trainer, run.initial_epoch)
            # Without parameters: the user has made the list.
            run.epochs_left = (callbacks.params or {}).get("epochs", 1) - first
            self._open_points(run)

    def _compare_loggers(self, run: TrainerRun, callbacks: CallbackList) -> None:
        session = self.sessions.shared()
        if session is not None and self.sessions.runs == [run]:
            loggers.refuse_several_runs(callbacks, session)

    def _open_points(self, run: TrainerRun) -> None:
        """Opens the points of a fit whose callbacks are known; a fit inside of it has none."""
        if self.sessions.shared() is not None and self.sessions.runs == [run]:
            saves = bool(keras_private.save_functions(run.callbacks))
            run.at_end.enter_context(self.sessions.processes.points(saves))

    @replaces(
        "keras.src.callbacks.callback_list:CallbackList.on_train_batch_end",
        reason="After it all ranks may end together, on SIGTERM.",
    )
    def batch_end(
        self, original: Original, callbacks: CallbackList, batch: int, logs: object = None
    ) -> None:
        """Replaces `CallbackList.on_train_batch_end`; after the last batch the epoch's end comes.

        There the state has the next epoch, in which a resumed fit begins.
        """
        original(callbacks, batch, logs)
        run = self._run(callbacks)
        if run is not None:
            self._wait_for_all_if_stopped(run)
            if batch + 1 < (callbacks.params.get("steps") or batch + 2):
                self._pass_point(run, steps=batch + 1)

    @replaces(
        "keras.src.callbacks.callback_list:CallbackList.on_epoch_end",
        reason="After it all ranks may end together, on SIGTERM.",
    )
    def epoch_end(
        self, original: Original, callbacks: CallbackList, epoch: int, logs: object = None
    ) -> None:
        """Replaces `CallbackList.on_epoch_end`."""
        original(callbacks, epoch, logs)
        run = self._run(callbacks)
        if run is not None:
            self._wait_for_all_if_stopped(run)
            self._pass_point(run, steps=0)  # of the next epoch

    @replaces(
        "keras.src.callbacks.callback_list:CallbackList.on_train_end",
        reason="After it all ranks may end together, on SIGTERM.",
    )
    def train_end(self, original: Original, callbacks: CallbackList, logs: object = None) -> None:
        """Replaces `CallbackList.on_train_end`, after which all is done: a backup is removed."""
        run = self._run(callbacks)
        original(callbacks, logs)
        if run is not None:
            self.sessions.processes.pass_point(lambda: None)

    def _run(self, callbacks: CallbackList) -> TrainerRun | None:
        """Finds the fit of several ranks that has these callbacks; None for any other."""
        run = self.sessions.run()
        if run is None or run.callbacks is not callbacks or self.sessions.runs != [run]:
            return None
        return None if self.sessions.shared() is None else run

    def _wait_for_all_if_stopped(self, run: TrainerRun) -> None:
        if run.trainer.stop_training and not run.is_stopped:
            run.is_stopped = True
            self.sessions.processes.barrier(
                f"the end of fit() of model {run.trainer.name!r}, as stop_training is True on this "
                "rank (for a decision that all ranks share: shardcore.agree)"
            )

    def _pass_point(self, run: TrainerRun, steps: int) -> None:
        def save() -> None:
            run.ends_after = steps
            for save in keras_private.save_functions(run.callbacks):
                save()

        self.sessions.processes.pass_point(save)
