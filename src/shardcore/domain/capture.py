"""The states of a captured step: when it is recorded, runs from a program, or runs eagerly.

The steps of one function with batches of one signature share one state. They are recorded once that
pays (ADR 59).
"""

import math
from collections.abc import Mapping
from enum import Enum
from types import MappingProxyType

import attrs

from shardcore.domain.errors import ControlFlow


class NotCaptured(ControlFlow):
    """A step cannot be run from a trace. The message says why, and where that is written."""


class TracesDiffer(NotCaptured):
    """Two traces of a step differ, often because the first run fills a cache."""


class GuardFailed(ControlFlow):
    """A step reads a number on the host that differs from the recorded one."""


# The bytes from which on a value is sliced, and the outputs of a model are not held whole (ADR 60).
# A slice takes a call of each operator: of smaller values, more time than memory is worth.
LARGE_VALUE = 64 * 2**20


class State(Enum):
    """The way in which the next step runs."""

    DEFERRED = "deferred"
    """Eagerly: batches of another size have a program, so this size is recorded later."""
    NEW = "new"
    """Eagerly, and it is recorded once that pays: a program of another size may replace a second
    trace."""
    RECORDED = "recorded"
    """Eagerly, and it is recorded: if an earlier trace is equal, both become a program."""
    CAPTURED = "captured"
    """From the program whose guards hold; if there is none, as in RECORDED."""
    EAGER = "eager"
    """Eagerly, from now on."""


class Event(Enum):
    """An event of a step."""

    SKIPPED = "skipped"
    """It ran eagerly, unrecorded: a rank is being profiled, or imported a module, or another size
    has a program."""
    RECORDED = "recorded"
    """It was recorded; no earlier trace read the same numbers on the host."""
    POSTPONED = "postponed"
    """It was recorded, which took too long for the steps that are left: its trace is dropped."""
    DIFFERED = "differed"
    """It was recorded; a trace with the same numbers has other operators."""
    MATCHED = "matched"
    """Its trace equals an earlier one or that of another size: all ranks have a program."""
    RAN = "ran"
    """A program ran."""
    CHANGED = "changed"
    """Python state differs from the recorded state: its programs are dropped."""
    REFUSED = "refused"
    """It cannot be run from a trace, on this or on another rank."""


TRANSITIONS: Mapping[tuple[State, Event], State] = MappingProxyType(
    {
        (State.DEFERRED, Event.SKIPPED): State.NEW,
        (State.NEW, Event.SKIPPED): State.NEW,
        (State.NEW, Event.POSTPONED): State.NEW,
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

# How often two traces may differ: a library plans its work once for each new shape.
MOST_DIFFERENCES = 2
# How often programs may be dropped, with few runs in between.
MOST_CHANGES = 8
# A change after more runs than these does not count as one of a series.
FEW_RUNS = 20


@attrs.frozen
class Progress:
    """The state of a step, and its counts.

    Args:
        state: How the next step runs.
        runs: Runs of its programs since they exist.
        changes: Consecutive changes, each after few runs.
        differences: Traces that differed.
    """

    state: State = State.NEW
    runs: int = 0
    changes: int = 0
    differences: int = 0

    def after(self, event: Event) -> "Progress":
        """Looks the next state up in `TRANSITIONS`, and counts the event.

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
        """Whether the step changes, or its traces differ, too often to be captured."""
        return self.changes > MOST_CHANGES or self.differences > MOST_DIFFERENCES


# The figures of recording are those of the benchmarks `warmup` and `growth`.
# The steps, left or run, from which on a step is recorded. Two recorded steps and the program take
# about ten eager steps, and a captured step saves half of an eager one.
NEEDED = 20
# The eager steps before the first recorded one: the first builds, the next is measured.
MEASURED = 2
# The share of an eager step that a captured step saves at least.
SAVED = 0.4
# The second recorded step, in first ones: the program is made in it.
SECOND = 1.3
# Where recording takes too long for the steps left, it is tried again after so many times more.
LATER = 4


@attrs.frozen
class Payback:
    """The eager steps with batches of one signature, and from when on recording one pays.

    Args:
        steps: The steps that ran eagerly and were not recorded.
        seconds: The time of the quickest of them, the first left out.
        needed: The steps, left or run, from which on a step is recorded.

    Example:
        >>> payback = Payback().after(0.9).after(0.05)
        >>> payback.is_due(left=9), payback.is_due(left=500)
        (False, True)
        >>> payback.is_worth(500, recorded=0.3), payback.is_worth(20, recorded=5.0)
        (True, False)
    """

    steps: int = 0
    seconds: float = math.inf
    needed: int = NEEDED

    def after(self, seconds: float) -> "Payback":
        """Counts another eager step of `seconds`; the first, which builds, is not timed."""
        quickest = min(self.seconds, seconds) if self.steps else self.seconds
        return attrs.evolve(self, steps=self.steps + 1, seconds=quickest)

    def postponed(self) -> "Payback":
        """Asks for `LATER` times more steps: recording took too long for those that are left."""
        return attrs.evolve(self, needed=LATER * self.needed)

    def is_due(self, left: float | None, recordings: int = 2) -> bool:
        """Tells whether to record the next step, by counts only: so all ranks agree.

        Args:
            left: The steps that are left; None if that is unknown: then as many as have run. With
                infinity a step is recorded at once.
            recordings: The recorded steps that a program takes.
        """
        if left == math.inf:
            return True
        is_measured = self.steps >= MEASURED
        return is_measured and 2 * self._expected(left) >= recordings * self.needed

    def is_worth(self, left: float | None, recorded: float) -> bool:
        """Tells whether a second recorded step pays, after a first one of `recorded` seconds."""
        saved = self._expected(left) * SAVED * self.seconds
        return saved >= SECOND * recorded - self.seconds

    def _expected(self, left: float | None) -> float:
        return max(left or 0, self.steps)
