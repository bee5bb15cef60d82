"""Contenders in turns, so that whatever else this machine does meets all of them."""

import contextlib
import statistics
import sys
import time
from collections.abc import Sequence
from typing import Any

import attrs

from benchmarks.cases import Case
from benchmarks.contender import JAX, Contender
from benchmarks.lanes import Lane, LaneFailed

FIRST_LOSSES = 3
MORE_STEPS = 3  # of a captured step, which may need some to settle
LOSS_TOLERANCE = 1e-4


@attrs.define
class Measured:
    """The measurements of one contender.

    Attributes:
        losses: Of its first steps.
        warm_up: Seconds of its first steps, before any time was taken.
        first_steps: How many those were.
        seconds: Per step, of each round.
        layer_calls: Layers that a step calls in Python.
        memory: Bytes, by name.
        failure: Why there are no figures; empty if there are.
    """

    name: str
    losses: list[float] = attrs.field(factory=list)
    warm_up: float = 0.0
    first_steps: int = 0
    seconds: list[float] = attrs.field(factory=list)
    layer_calls: int | None = None
    memory: dict[str, int] = attrs.field(factory=dict)
    failure: str = ""

    @property
    def step(self) -> float:
        """Seconds of the median round's step."""
        return statistics.median(self.seconds)

    @property
    def extra(self) -> float:
        """Seconds that the first steps took beyond what such steps take later."""
        return self.warm_up - self.first_steps * self.step

    def ratio(self, other: "Measured") -> float:
        """The median of the ratios of the rounds: both sides of each were measured together."""
        pairs = zip(self.seconds, other.seconds, strict=True)
        return statistics.median(mine / theirs for mine, theirs in pairs)


def run(
    case: Case,
    contenders: Sequence[Contender],
    rounds: int,
    *,
    device: str = "cpu",
    memory: bool = False,
    first_steps: int = 0,
) -> dict[str, Measured]:
    """Start all, check that their first losses agree, and take times in turns.

    Args:
        case: What is trained.
        contenders: The first is the reference of the losses.
        rounds: How often each has its turn.
        device: "cpu" or "cuda".
        memory: Whether to ask each what it stores and needs, when times have been taken.
        first_steps: Steps of each before any time is taken; else as many as it needs to settle.

    Returns:
        By the name of the contender. One that failed, or whose losses differ, has no times.
    """
    found = {each.name: Measured(each.name) for each in contenders}
    with contextlib.ExitStack() as stack:
        lanes = {
            each.name: _open(stack, each, case, device, found, first_steps) for each in contenders
        }
        running = {name: lane for name, lane in lanes.items() if lane is not None}
        for _ in range(rounds):
            for name, lane in running.items():
                found[name].seconds.append(lane.ask("epoch", case.steps))
        for each in contenders:
            if each.name in running and each.captured:
                found[each.name].layer_calls = running[each.name].ask("layer_calls")
    if memory:
        for each in contenders:
            if each.name in running and each.name != JAX:
                found[each.name].memory = _memory(each, case, device)
    return found


def _open(
    stack: contextlib.ExitStack,
    contender: Contender,
    case: Case,
    device: str,
    found: dict[str, Measured],
    first_steps: int,
) -> Lane | None:
    """The contender, warmed up; None where it failed, which is noted."""
    measured = found[contender.name]
    began = time.perf_counter()
    try:
        lane = contender.open_lane(case, device)
        stack.callback(lane.close)
        opened = time.perf_counter()
        measured.losses = lane.ask("losses", FIRST_LOSSES)
        settling = MORE_STEPS if contender.captured else 0
        more = max(first_steps - FIRST_LOSSES, settling)
        if more:
            lane.ask("epoch", more)
        measured.first_steps = FIRST_LOSSES + more
        measured.warm_up = time.perf_counter() - opened
        measured.failure = disagreement(measured.losses, _reference(found))
    except LaneFailed as failed:
        measured.failure = str(failed)
    outcome = measured.failure or f"ready in {time.perf_counter() - began:.0f} s"
    print(f"{case.name}: {contender.name}: {outcome}", file=sys.stderr, flush=True)
    return None if measured.failure else lane


def _memory(contender: Contender, case: Case, device: str) -> dict[str, int]:
    """Measures the memory of the contender in a new lane, in which no time is taken."""
    lane = contender.open_lane(case, device, maps=True)
    with contextlib.closing(lane):
        lane.ask("losses", FIRST_LOSSES)
        lane.ask("epoch", MORE_STEPS)
        return lane.ask("memory")


def _reference(found: dict[str, Measured]) -> Measured:
    return next(each for each in found.values() if each.losses)


def disagreement(losses: Sequence[float], reference: Any) -> str:
    """Describes how these first losses differ from the reference; empty if they do not."""
    pairs = zip(losses, reference.losses, strict=True)
    if all(abs(mine - theirs) <= LOSS_TOLERANCE for mine, theirs in pairs):
        return ""
    return f"losses {losses} are not those of {reference.name}: {reference.losses}"
