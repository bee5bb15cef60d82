"""When a step is recorded, when it runs from a program, and what makes it be recorded again.

The steps of one function with batches of one signature go through these states together.
"""

from collections.abc import Mapping
from enum import Enum
from types import MappingProxyType

import attrs

from shardcore.domain.errors import ShardcoreError


class NotCaptured(ShardcoreError):  # noqa: N818 - it is no error: the step runs eagerly
    """A step cannot be run from a recording. The message says why, and where that is written."""


class RecordingsDiffer(NotCaptured):
    """Two runs of a step did not do the same; what the first found out once may be the reason."""


class GuardFailed(ShardcoreError):  # noqa: N818 - it is no error: another program may fit
    """A step reads another number on the host than its program was recorded with."""


class State(Enum):
    """How the next step runs."""

    DEFERRED = "deferred"
    """Eagerly: steps with batches of another size have a program, so it is recorded later."""
    NEW = "new"
    """Eagerly, and it is recorded: a program of another size may do for a second recording."""
    RECORDED = "recorded"
    """Eagerly, and it is recorded: if an earlier recording is equal, both become a program."""
    CAPTURED = "captured"
    """From the program whose guards hold; if there is none, as in RECORDED."""
    EAGER = "eager"
    """Eagerly, from now on."""


class Event(Enum):
    """An event of a step."""

    SKIPPED = "skipped"
    """It ran eagerly and was not recorded: a rank is profiled, or another size has a program."""
    RECORDED = "recorded"
    """It was recorded; no recording before has read the same numbers on the host."""
    DIFFERED = "differed"
    """It was recorded; a recording with the same numbers has other operators."""
    MATCHED = "matched"
    """It was recorded, as before or as with another size: it became a program, on all ranks."""
    RAN = "ran"
    """A program ran."""
    CHANGED = "changed"
    """Python holds something else than when the step was recorded: its programs are dropped."""
    REFUSED = "refused"
    """It cannot be run from a recording, on this or on another rank."""


TRANSITIONS: Mapping[tuple[State, Event], State] = MappingProxyType(
    {
        (State.DEFERRED, Event.SKIPPED): State.NEW,
        (State.NEW, Event.SKIPPED): State.NEW,
        (State.NEW, Event.RECORDED): State.RECORDED,
        (State.NEW, Event.MATCHED): State.CAPTURED,
        (State.NEW, Event.REFUSED): State.EAGER,
        (State.RECORDED, Event.SKIPPED): State.RECORDED,
        (State.RECORDED, Event.RECORDED): State.RECORDED,
        (State.RECORDED, Event.DIFFERED): State.RECORDED,
        (State.RECORDED, Event.MATCHED): State.CAPTURED,
        (State.RECORDED, Event.CHANGED): State.NEW,
        (State.RECORDED, Event.REFUSED): State.EAGER,
        (State.CAPTURED, Event.RAN): State.CAPTURED,
        (State.CAPTURED, Event.SKIPPED): State.CAPTURED,
        (State.CAPTURED, Event.RECORDED): State.CAPTURED,
        (State.CAPTURED, Event.DIFFERED): State.CAPTURED,
        (State.CAPTURED, Event.MATCHED): State.CAPTURED,
        (State.CAPTURED, Event.CHANGED): State.NEW,
        (State.CAPTURED, Event.REFUSED): State.EAGER,
    }
)

# How often two recordings may differ: a library plans its work once for each new shape.
MOST_DIFFERENCES = 2
# How often programs may be dropped, with few runs in between.
MOST_CHANGES = 8
# After more runs than these a change is one of its own, and not one of a row.
FEW_RUNS = 20


@attrs.frozen
class Progress:
    """The state of a step, and what is counted of it.

    Args:
        state: How the next step runs.
        runs: Runs of programs since they were made.
        changes: Changes in a row, each after few runs.
        differences: Recordings that differed.
    """

    state: State = State.NEW
    runs: int = 0
    changes: int = 0
    differences: int = 0

    def after(self, event: Event) -> "Progress":
        """The progress after `event`.

        Example:
            >>> progress = Progress()
            >>> for event in (Event.RECORDED, Event.MATCHED, Event.RAN):
            ...     progress = progress.after(event)
            >>> progress.state, progress.runs
            (<State.CAPTURED: 'captured'>, 1)
        """
        state = TRANSITIONS[self.state, event]
        if event is Event.RAN:
            return attrs.evolve(self, runs=self.runs + 1)
        if event is Event.DIFFERED:
            return attrs.evolve(self, state=state, differences=self.differences + 1)
        if event is Event.CHANGED:
            changes = 1 if self.runs > FEW_RUNS else self.changes + 1
            return attrs.evolve(self, state=state, runs=0, changes=changes)
        return attrs.evolve(self, state=state)

    @property
    def is_unstable(self) -> bool:
        """Whether the step changes, or its recordings differ, too often to be captured."""
        return self.changes > MOST_CHANGES or self.differences > MOST_DIFFERENCES
