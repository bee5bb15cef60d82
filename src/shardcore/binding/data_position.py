"""The position of a fit in its data: how many batches it has drawn, and in which order they come.

A shuffled loader draws its order from torch's generator when it begins. With the states of the
generator at that time the same batches come again.
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import attrs
import torch
from keras import Variable

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
        """Returns the position as JSON."""
        made, begun = (state.numpy().tobytes().hex() for state in (self.made, self.begun))
        return {"made": made, "begun": begun, "batches": self.batches, "steps": self.steps}

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> "SavedPosition":
        """Returns the position that `to_json` has written."""
        made, begun = (
            torch.frombuffer(bytearray.fromhex(content[name]), dtype=torch.uint8)
            for name in ("made", "begun")
        )
        return cls(made, begun, int(content["batches"]), int(content["steps"]))


@attrs.define(eq=False)
class DataPosition:
    """The position of a running fit.

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
    _batches: int = attrs.field(default=0, init=False)

    def saved(self, steps: int) -> SavedPosition | None:
        """Returns the position now, after `steps` steps of the epoch; None without an iterator."""
        if self._made is None:
            return None
        begun = self._made if self._begun is None else self._begun
        return SavedPosition(self._made, begun, self._batches, steps)

    def restore_metrics(self) -> None:
        """Gives the metrics their values, once."""
        metrics, self.metrics = self.metrics, []
        for variable, value in metrics:
            variable.assign(value)

    def note_iterator(self) -> None:
        """Notes that the iterator is made now."""
        if self.ahead is not None:
            torch.set_rng_state(self.ahead.made)
        self._made, self._begun, self._batches = torch.get_rng_state(), None, 0

    def note_drawing(self) -> None:
        """Notes that a batch is drawn now."""
        if self._begun is None:
            if self.ahead is not None:
                torch.set_rng_state(self.ahead.begun)
            self._begun = torch.get_rng_state()

    def note_drawn(self) -> None:
        """Notes that a batch was drawn."""
        self._batches += 1


@attrs.define(eq=False)
class Counted:
    """Batches of a data adapter, with a count of those that were drawn."""

    source: Iterable[object]
    position: DataPosition
    _batches: Iterator[object] = attrs.field(factory=lambda: iter(()), init=False)

    def __iter__(self) -> "Counted":
        """Makes the iterator, and draws the batches before the position that is ahead."""
        self.position.note_iterator()
        self._batches = iter(self.source)
        ahead = self.position.ahead
        for number in range(0 if ahead is None else ahead.batches):
            if next(self, None) is None:
                raise CheckpointError(
                    f"The checkpoint was saved after {ahead and ahead.batches} batches of the "
                    f"data, but this data ends after {number}: give the data that it was saved "
                    "with; or begin again, by ShardedCheckpoint(resume=False), or without the "
                    "folder of BackupAndRestore."
                )
        self.position.ahead = None
        return self

    def __next__(self) -> object:
        """Returns the next batch."""
        self.position.note_drawing()
        batch = next(self._batches)
        self.position.note_drawn()
        return batch
