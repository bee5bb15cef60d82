"""The times at which a callback saves: after steps, epochs or minutes, alike on all ranks."""

import time

import attrs

from shardcore.binding.ranks.session import Sessions
from shardcore.domain.errors import CheckpointError


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
        """Returns whether a checkpoint is due after `step`; `before` was the step before it."""
        by_steps = self.steps is not None and step // self.steps != before // self.steps
        return self._by_minutes(step) or by_steps

    def after_epoch(self, epochs: int) -> bool:
        """Returns whether a checkpoint is due after this many epochs."""
        return self.epochs is not None and epochs % self.epochs == 0

    def _by_minutes(self, step: int) -> bool:
        """Returns whether the minutes are over on the clock of rank 0. A collective at some steps.

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
