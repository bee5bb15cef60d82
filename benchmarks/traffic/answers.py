"""Puts together what the ranks of shardcore counted for one case, as plain data."""

from collections.abc import Sequence
from typing import Any

from attrs import frozen

from benchmarks.traffic.models import RANKS
from benchmarks.traffic.sent_bytes import as_json, of_counts
from benchmarks.traffic.stored import one_line


@frozen
class Counted:
    """The counts of one rank in one step.

    Attributes:
        calls: Collectives by kind.
        operand_bytes: What was handed to them, by kind.
    """

    calls: dict[str, int]
    operand_bytes: dict[str, int]


@frozen
class Found:
    """The counts of one rank for a case.

    Attributes:
        captured: Its captured step; None if no step was captured.
        eager: Its eager step.
        reason: Why no step was captured.
        failure: What was raised instead.
    """

    captured: Counted | None = None
    eager: Counted | None = None
    reason: str = ""
    failure: str = ""


def answer(ranks: Sequence[Found]) -> dict[str, Any]:
    """Convert what each rank found into what the rank that sends most sends.

    Example:
        >>> step = Counted({"all_reduce": 1}, {"all_reduce": 8})
        >>> answer([Found(step, step), Found(step, step)])["captured"]
        {'sent': 8, 'calls': {'all_reduce': 1}}
        >>> answer([Found(failure="KeyError: 3"), Found(failure="KeyError: 3")])
        {'failure': 'KeyError: 3'}
    """
    if failures := [each.failure for each in ranks if each.failure]:
        return failure(failures[0])
    captured = _step([each.captured for each in ranks])
    found: dict[str, Any] = {"captured": captured} if captured else {}
    found["eager"] = _step([each.eager for each in ranks])
    return found if captured else {**found, "reason": one_line(ranks[0].reason)}


def failure(text: str) -> dict[str, Any]:
    """Tell that a case could not be trained, and why."""
    return {"failure": one_line(text)}


def _step(steps: Sequence[Counted | None]) -> dict[str, Any] | None:
    """Convert one step; None unless every rank has counted it."""
    counted = [(each.calls, each.operand_bytes) for each in steps if each is not None]
    return as_json(of_counts(counted, RANKS)) if len(counted) == len(steps) else None
