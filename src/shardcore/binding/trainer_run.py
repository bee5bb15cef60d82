"""A running fit, evaluate, predict or step: its callbacks, its position in the data, its batches.

A shuffled loader draws its order from torch's generator when it begins. With the states of the
generator at that time the same batches come again. The batch of the next step is drawn while the
device computes this one (ADR 58).
"""

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import attrs
import torch
from keras import Model, Variable
from keras.callbacks import CallbackList

from shardcore.binding import keras_private
from shardcore.binding.step_meter import StepMeter
from shardcore.domain.errors import CheckpointError


@attrs.frozen(eq=False)
class SavedPosition:
    """A position in the data, as a checkpoint saves it.

    Args:
        made: The state of torch's generator when the iterator was made.
        begun: Its state at the first batch.
        batches: The batches that were drawn from the iterator.
        steps: The steps of the epoch so far.
    """

    made: torch.Tensor
    begun: torch.Tensor
    batches: int
    steps: int

    def to_json(self) -> dict[str, object]:
        """Encodes the states of the generator in hex, for JSON."""
        made, begun = (state.numpy().tobytes().hex() for state in (self.made, self.begun))
        return {"made": made, "begun": begun, "batches": self.batches, "steps": self.steps}

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> "SavedPosition":
        """Decodes what `to_json` has written."""
        made, begun = (
            torch.frombuffer(bytearray.fromhex(content[name]), dtype=torch.uint8)
            for name in ("made", "begun")
        )
        return cls(made, begun, int(content["batches"]), int(content["steps"]))


@attrs.define(eq=False)
class DataPosition:
    """The position of a running fit, and the batches that it counts.

    Attributes:
        ahead: The position to which the next iterator goes first; None for its beginning.
        metrics: Variables of metrics, and the values that they have there.
        goes_on: Whether one iterator serves several epochs, as with `steps_per_epoch`.
    """

    ahead: SavedPosition | None = None
    metrics: list[tuple[Variable, Any]] = attrs.field(factory=list)
    goes_on: bool = attrs.field(default=False, init=False)
    _made: torch.Tensor | None = attrs.field(default=None, init=False)
    _begun: torch.Tensor | None = attrs.field(default=None, init=False)
    _drawn: int = attrs.field(default=0, init=False)
    _source: Iterable[object] = attrs.field(default=(), init=False)
    _batches: Iterator[object] = attrs.field(factory=lambda: iter(()), init=False)

    def saved(self, steps: int) -> SavedPosition | None:
        """Describes the position after `steps` steps of the epoch; None without an iterator."""
        if self._made is None:
            return None
        begun = self._made if self._begun is None else self._begun
        return SavedPosition(self._made, begun, self._drawn, steps)

    def restore_metrics(self) -> None:
        """Assigns their values to the variables of metrics, once."""
        metrics, self.metrics = self.metrics, []
        for variable, value in metrics:
            variable.assign(value)

    def read(self, source: Iterable[object], goes_on: bool) -> "DataPosition":
        """Reads another source of batches from now on, and counts them."""
        self._source, self.goes_on = source, goes_on
        return self

    def __iter__(self) -> "DataPosition":
        """Makes the iterator, and draws the batches before the position that is ahead."""
        if self.ahead is not None:
            torch.set_rng_state(self.ahead.made)
        self._made, self._begun, self._drawn = torch.get_rng_state(), None, 0
        self._batches = iter(self._source)
        ahead = self.ahead
        for number in range(0 if ahead is None else ahead.batches):
            if next(self, None) is None:
                raise CheckpointError(
                    f"The checkpoint was saved after {ahead and ahead.batches} batches of the "
                    f"data, but this data ends after {number}: give the data that it was saved "
                    "with; or begin again, by ShardedCheckpoint(resume=False), or without the "
                    "folder of BackupAndRestore."
                )
        self.ahead = None
        return self

    def __next__(self) -> object:
        """Draws a batch; the first one of a resumed fit by the generator's state of that time."""
        if self._begun is None:
            if self.ahead is not None:
                torch.set_rng_state(self.ahead.begun)
            self._begun = torch.get_rng_state()
        batch = next(self._batches)
        self._drawn += 1
        return batch


@attrs.frozen(eq=False)
class Drawn:
    """A batch that was drawn before its step.

    Args:
        batch: As the source gives it.
        rows: Gives the batch as the step takes it: the rows of this rank, on its device.
    """

    batch: object
    rows: Callable[[], Any]


Draw = Callable[[Iterator[object]], Drawn]


@attrs.define(eq=False)
class Prefetch:
    """The batches of a data adapter, of which that of the next step may be drawn ahead.

    All of it runs on the main thread, after a step has started its kernels: the source may run code
    of the user or collectives, which keep the order that they have without prefetch.

    Attributes:
        left: The batches of this epoch that were not drawn yet; None if their number is unknown.
        seconds: Those of the host that all batches took.
    """

    seconds: float = attrs.field(default=0.0, init=False)
    left: int | None = attrs.field(default=None, init=False)
    _source: Iterable[object] = attrs.field(default=(), init=False)
    _draw: Draw | None = attrs.field(default=None, init=False)
    _is_shared: bool = attrs.field(default=False, init=False)
    _batches: Iterator[object] = attrs.field(factory=lambda: iter(()), init=False)
    _ahead: Drawn | Exception | None = attrs.field(default=None, init=False)
    _taken: Drawn | None = attrs.field(default=None, init=False)

    def read(
        self, source: Iterable[object], draw: Draw | None, is_shared: bool = False
    ) -> "Prefetch":
        """Reads another source from now on.

        Args:
            source: The batches.
            draw: Draws a batch ahead; None if none may be.
            is_shared: Whether several ranks read: they may compare what they draw.
        """
        self._source, self._draw, self._is_shared = source, draw, is_shared
        return self

    def __iter__(self) -> "Prefetch":
        self._batches, self._ahead, self._taken = iter(self._source), None, None
        return self

    def __next__(self) -> object:
        """Takes the batch that was drawn ahead, or draws the next one.

        Raises:
            Exception: What the source has raised in place of it.
        """
        ahead, self._ahead, self._taken = self._ahead, None, None
        if ahead is None:
            self._count()
            with self._timed():
                return next(self._batches)
        if isinstance(ahead, Exception):
            raise ahead
        self._taken = ahead
        return ahead.batch

    def rows(self, batch: object) -> Any:
        """Takes the rows of a batch as its step needs them; None if it was not drawn ahead."""
        drawn, self._taken = self._taken, None
        return drawn.rows() if drawn is not None and drawn.batch is batch else None

    def fill(self) -> None:
        """Draws the batch of the next step, if the epoch has one.

        An error of one process is raised where the batch is asked for, as without prefetch. One of
        several ranks is raised at once: the others may wait for this rank's batch already, and a
        callback that saves would wait for them.
        """
        if self._draw is None or self._ahead is not None or self.left == 0:
            return
        self._count()
        try:
            with self._timed():
                self._ahead = self._draw(self._batches)
        except StopIteration as end:
            self._ahead = end
        except Exception as error:
            if self._is_shared:
                raise
            self._ahead = error

    @contextmanager
    def _timed(self) -> Iterator[None]:
        began = time.perf_counter()
        try:
            yield
        finally:
            self.seconds += time.perf_counter() - began

    def _count(self) -> None:
        if self.left:
            self.left -= 1


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
    meter: StepMeter | None = None  # if a callback reports figures of its steps
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
        """Counts the steps that are left, the one that runs included; None if unknown."""
        if self.batches is None or self.prefetch.left is None:
            return None
        return 1 + self.prefetch.left + self.epochs_left * self.batches

    def follows(self) -> bool:
        """Tells whether no code of the user ran between the last step and this one."""
        self.steps += 1
        return self.is_undisturbed and self.steps > 1

    def is_read(self) -> bool:
        """Tells whether a callback on this rank may read the model between two steps."""
        return (
            self.callbacks is None
            or self.phase == "predict"  # which updates no metrics
            or keras_private.gives_own_logs(self.trainer, f"{self.phase}_step")
            or keras_private.read_steps(self.callbacks, self.phase)
        )

    def agree(self, is_read: bool) -> None:
        """Defers the metrics of the epoch that begins, unless a rank reads them: `is_read`."""
        self.deferred = () if is_read else tuple(self.trainer.metrics_variables)
