"""Patch: the trainer. Batches are sharded before a step, and its results all-gathered after it."""

import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import attrs
import torch
from keras import Model

from shardcore.binding import keras_private
from shardcore.binding.capture.agreement import settings_of
from shardcore.binding.capture.large_steps import is_large
from shardcore.binding.capture.step import CapturedStep
from shardcore.binding.cost import rules_report
from shardcore.binding.data import batches
from shardcore.binding.data.data_adapters import RowsAhead, compare_batches, epoch_facts
from shardcore.binding.engine import adoption
from shardcore.binding.keras_private.patches import replaces
from shardcore.binding.ranks import rank_consistency
from shardcore.binding.ranks.session import Session, Sessions
from shardcore.binding.step_meter import RunStep, Step, StepMeter
from shardcore.binding.trainer_run import TrainerRun
from shardcore.binding.training import undisturbed
from shardcore.binding.training.emulation import EmulationWarning
from shardcore.binding.types import Original
from shardcore.ports.capture import StepCapture

# The arguments of `fit` by which ranks could run another number of epochs.
_EPOCHS = ("epochs", "initial_epoch")


@attrs.frozen
class Steps:
    """The members of `TorchTrainer` and its helpers that shardcore replaces."""

    sessions: Sessions
    capture: StepCapture[torch.Tensor]
    emulation: EmulationWarning = attrs.field(factory=EmulationWarning, init=False)

    @replaces(
        "keras.src.backend.torch.trainer:TorchTrainer.make_train_function",
        "keras.src.backend.torch.trainer:TorchTrainer.make_test_function",
        "keras.src.backend.torch.trainer:TorchTrainer.make_predict_function",
        reason="A batch is sharded before the step, and its logs are all-gathered after it.",
    )
    def make(self, name: str, original: Original, trainer: Model, force: bool = False) -> Any:
        """Replaces `make_train_function`, `make_test_function` and `make_predict_function`."""
        _, kind, _ = name.split("_")
        function_name = f"{kind}_function"  # the attribute for the result
        before = getattr(trainer, function_name)
        is_old = isinstance(before, _Step) and before.sessions is not self.sessions
        result = original(trainer, force=force or is_old)
        function = getattr(trainer, function_name)
        if function is not before:
            self.emulation.check(trainer)
            captured = CapturedStep(trainer, f"{kind}_step", self.capture)
            setattr(trainer, function_name, _Step(self.sessions, trainer, function, captured))
        return result

    @replaces(
        "keras.src.backend.torch.trainer:TorchTrainer.fit",
        "keras.src.backend.torch.trainer:TorchTrainer.evaluate",
        "keras.src.backend.torch.trainer:TorchTrainer.predict",
        "keras.src.backend.torch.trainer:TorchTrainer.train_on_batch",
        "keras.src.backend.torch.trainer:TorchTrainer.test_on_batch",
        "keras.src.backend.torch.trainer:TorchTrainer.predict_on_batch",
        reason="Outside its scope, data, callbacks and files of a sharded model find no mesh.",
    )
    def within_scope(
        self, original: Original, trainer: Model, *args: object, **kwargs: object
    ) -> Any:
        """Replaces `fit` and the like: runs a sharded model in its scope, also after its end.

        Data, callbacks and files read the distribution, not only the steps. All ranks call it.
        """
        with (
            self.sessions.scope_of(trainer),
            self.sessions.working(trainer) as run,
            self._collective_call(original.__name__, trainer, kwargs),
        ):
            initial = kwargs.get("initial_epoch")
            run.initial_epoch = initial if isinstance(initial, int) else 0
            return original(trainer, *args, **kwargs)

    def _collective_call(
        self, name: str, trainer: Model, options: dict[str, object]
    ) -> AbstractContextManager[None]:
        session = self.sessions.shared()
        if session is None:
            return nullcontext()
        if name.endswith("_on_batch") and trainer in session.checked:
            return nullcontext()  # a step of a loop, whose first step had the barrier
        epochs = ", ".join(f"{option}={options[option]}" for option in _EPOCHS if option in options)
        return self.sessions.collective_call(f"{name}({epochs}) of model {trainer.name!r}")

    @replaces(
        "keras.src.backend.torch.trainer:TorchTrainer._should_torch_compile",
        reason="torch.compile dies on Keras' own Python over sharded tensors: traces are compiled.",
    )
    def compilation(self, original: Original, trainer: Model) -> Any:
        """Replaces `_should_torch_compile`: a captured step is compiled from its trace."""
        return False if self.sessions.are_served() else original(trainer)

    @replaces(
        "keras.src.trainers.epoch_iterator:EpochIterator.__iter__",
        reason="Generators and replicated variables are compared there, and a resumed fit goes on.",
    )
    def begin(self, original: Original, iterator: keras_private.EpochIterator) -> Any:
        """Replaces `EpochIterator.__iter__`: compares ranks, skips batches of finished steps."""
        session, run = self.sessions.shared(), self.sessions.run()
        if run is not None:
            run.begin_epoch(undisturbed.is_undisturbed(run.callbacks, iterator.data_adapter))
        if session is not None:
            self._compare_before_epoch(session, run)
        position, steps = None if run is None else run.position, 0
        if position is None or position.ahead is None:
            original(iterator)
        else:
            state = torch.get_rng_state()
            steps = position.ahead.steps
            keras_private.begin_later(iterator, original, position.ahead.batches, steps)
            position.restore_metrics()  # Keras has reset them
            torch.set_rng_state(state)
        if run is not None and iterator.num_batches is not None:
            run.prefetch.left = iterator.num_batches - steps
            run.batches = iterator.num_batches
        return iterator

    def _compare_before_epoch(self, session: Session, run: TrainerRun | None) -> None:
        facts = rank_consistency.generators(session)
        if run is not None and run.trainer in session.checked:
            # its first step compares more
            facts |= rank_consistency.copies(run.trainer, session)
        readers = rank_consistency.compare(facts, session, run is None or run.is_read())
        if run is not None:
            run.agree(any(readers))

    @replaces(
        "keras.src.backend.torch.trainer:TorchEpochIterator._get_iterator",
        reason="Ranks with other numbers of steps are found there; batches are counted to resume.",
    )
    def epoch(self, original: Original, iterator: keras_private.EpochIterator) -> Any:
        """Replaces `TorchEpochIterator._get_iterator`: every process runs the same steps."""
        session, run = self.sessions.current(), self.sessions.run()
        adapter, source = iterator.data_adapter, original(iterator)
        may_prefetch = False
        if run is not None and self.sessions.are_served():
            may_prefetch = undisturbed.may_prefetch(run, adapter, source)
        if session is not None:
            facts = {"steps per epoch": str(iterator.num_batches), **epoch_facts(adapter, session)}
            may_prefetch = all(rank_consistency.compare(facts, session, may_prefetch))
            source = compare_batches(adapter, source, session)
        if run is None:
            return source
        ahead = RowsAhead(adapter, partial(_rows, self.sessions)) if may_prefetch else None
        is_shared = self.sessions.shared() is not None
        batches_of_process = run.prefetch.read(source, ahead, is_shared)
        if run.position is None:
            return batches_of_process
        return run.position.read(batches_of_process, goes_on=bool(iterator.steps_per_epoch))


def _rows(sessions: Sessions, batch: object) -> Any:
    """Shards a batch as a step does: the rows of this rank, on its device."""
    session = sessions.current()
    if session is None:
        return batches.step_on_one_device([batch], sessions)[0]
    with session.strategy.implicit_replication():
        return batches.distribute_step([batch], session)[0]


@attrs.frozen(eq=False)
class _Step:
    """A train, test or predict function over the global batch."""

    sessions: Sessions
    trainer: Model
    function: Callable[[Any], Any]
    captured: CapturedStep
    checked: "weakref.WeakSet[Session]" = attrs.field(factory=weakref.WeakSet, init=False)

    def __call__(self, data: list[object]) -> Any:
        if self.sessions.is_closed:  # the trainer has this step also after an uninstall
            return self.function(data)
        with self.sessions.scope_of(self.trainer):  # a sharded model may outlive its scope
            session, run = self.sessions.current(), self._run_of_trainer()
            logs = self._on_one_device(data) if session is None else self._on_mesh(data, session)
            if run is not None:
                run.prefetch.fill()
            return keras_private.logs_of_step(self.trainer, self.captured.name, logs)

    def _run_of_trainer(self) -> TrainerRun | None:
        run = self.sessions.run()
        return run if run is not None and run.trainer is self.trainer else None

    def _on_mesh(self, data: list[object], session: Session) -> Any:
        first = session not in self.checked
        run, follows, left = self._deferring_run(), self._follows(), self._steps_left()
        ahead, meter = self._rows_ahead(data), self._meter()
        with session.strategy.implicit_replication(), self.sessions.working(self.trainer):
            if first:
                adoption.adopt(self.trainer, session)
                settings = settings_of(self.trainer, self.captured.capture)
                rank_consistency.check_model(self.trainer, data, session, settings)
                rules_report.check_plan(self.trainer, session)
            batch = ahead or batches.distribute_step(data, session)
            large = is_large(self.captured, batch, session)
            run = None if large else run  # the step that creates deferred sums is eager
            sums = self.sessions.sums
            mode = sums.resume(run), batches.array_weights(data)

            def step() -> Any:
                with sums.step(run):
                    outputs = self.function(batch)
                # Callbacks may read logs on another thread, which must start no collective.
                return keras_private.map_tensors(session.strategy.full_tensor, outputs)

            # The first step of a run creates the stand-ins of deferred sums: no later one is alike.
            is_sharded = session.mesh.size > 1
            is_like_no_other = first and run is not None and is_sharded and not sums.are_deferred
            run_step = partial(
                self.captured,
                data=batch,
                session=session,
                mode=mode,
                follows=follows,
                left=left,
                large=large,
            )
            how = _eagerly if is_like_no_other else run_step
            outputs = self._measured(meter, how, step, batch)
            if first:
                self.checked.add(session)
            if self.trainer not in session.checked:
                session.checked.add(self.trainer)
                rules_report.warn_of_rules(self.trainer, session)
            return outputs

    def _rows_ahead(self, data: list[object]) -> list[Any] | None:
        run = self.sessions.run()
        rows = None if run is None or len(data) > 1 else run.prefetch.rows(data[0])
        return None if rows is None else [rows]

    def _deferring_run(self) -> TrainerRun | None:
        """Finds the run whose callbacks do not read the metrics of this step, None without one."""
        run = self._run_of_trainer()
        if run is None or not run.deferred:
            return None
        return run if self.captured.name == f"{run.phase}_step" else None

    def _on_one_device(self, data: list[object]) -> Any:
        """Runs the step of a model without sharding; a strategy for one device captures it."""
        self.sessions.warn_without_distribution()
        if not self.sessions.entry.serves_one_device:
            return self._measured(self._meter(), _eagerly, partial(self.function, data), data)
        batch = self._rows_ahead(data) or batches.step_on_one_device(data, self.sessions)

        def step() -> Any:
            with self.sessions.sums.step():
                return self.function(batch)

        mode = None, batches.array_weights(data)
        run_step = partial(
            self.captured,
            data=batch,
            session=None,
            mode=mode,
            follows=self._follows(),
            left=self._steps_left(),
            large=is_large(self.captured, batch, None),
        )
        return self._measured(self._meter(), run_step, step, batch)

    def _meter(self) -> StepMeter | None:
        run = self._run_of_trainer()
        return None if run is None else run.meter

    def _measured(
        self, meter: StepMeter | None, run_step: RunStep, step: Step, batch: list[object]
    ) -> Any:
        """Runs a step by `run_step`, and measures it if a callback of the run reports figures."""
        if meter is None:
            return run_step(step)
        return meter.run(run_step, step, batch, lambda: self.captured.program_counts)

    def _steps_left(self) -> int | None:
        run = self._run_of_trainer()
        return None if run is None else run.steps_left()

    def _follows(self) -> bool:
        """Tells whether no code of the user ran since the last step; counts this one."""
        run = self._run_of_trainer()
        return run is not None and run.follows()


def _eagerly(step: Step) -> Any:
    return step()
