"""All ranks capture a step, or none does: their programs must start the same collectives."""

import hashlib
from collections.abc import Callable
from typing import Any

import attrs

from shardcore.binding.context.session import Session
from shardcore.domain.capture import Event
from shardcore.ports.capture import Program, Recording


@attrs.frozen
class Outcome:
    """The outcome of a recording.

    Args:
        event: What happened to the step.
        program: The step, where the recording matched.
        reason: Why the step is refused.
    """

    event: Event
    program: Program | None = None
    reason: str = ""


def gathered(value: Any, session: Session | None) -> list[Any]:
    """Returns the values of all ranks, this rank's alone on one device."""
    return [value] if session is None else session.processes.gather(value)


def agreed(
    make: Callable[[tuple[int, ...] | None], Outcome],
    recording: Recording,
    session: Session | None,
) -> Outcome:
    """Returns this rank's outcome, or that of a rank which has no program, for all ranks.

    A rank whose shards have other sizes may put other all-reduces into one bucket. Then every rank
    makes its program again, by the sizes of the rank with most.

    Args:
        make: Makes the outcome of this rank, by these bytes of each all-reduce; by its own if None.
        recording: What the step did.
        session: The session of the step; None on one device.
    """
    outcome = make(None)
    events = gathered(outcome.event, session)
    if Event.REFUSED not in events and any(each is not Event.MATCHED for each in events):
        return Outcome(Event.DIFFERED if Event.DIFFERED in events else Event.RECORDED)
    refusal, is_same = _compared(outcome, session)
    if not refusal and not is_same:
        most = _most_bytes(recording, session)
        if most is not None:
            outcome = make(most)
            refusal, is_same = _compared(outcome, session)
        if not refusal and not is_same:
            refusal = "the ranks start other collectives"
    return Outcome(Event.REFUSED, reason=refusal) if refusal else outcome


def _compared(outcome: Outcome, session: Session | None) -> tuple[str, bool]:
    """Returns the reason of the first rank that refuses, and whether all start the same."""
    everyone = gathered((outcome.reason, _digests(outcome.program)), session)
    refusal = next((reason for reason, _ in everyone if reason), "")
    found: dict[str, set[str]] = {}
    for name, digest in (pair for _, digests in everyone for pair in digests.items()):
        found.setdefault(name, set()).add(digest)
    return refusal, all(len(each) == 1 for each in found.values())


def _most_bytes(recording: Recording, session: Session | None) -> tuple[int, ...] | None:
    """Returns the most bytes that a rank sends in each all-reduce; None if they do not match."""
    everyone = gathered(recording.all_reduce_bytes, session)
    if len({len(each) for each in everyone}) > 1:
        return None
    return tuple(map(max, *everyone))


def _digests(program: Program | None) -> dict[str, str]:
    """Returns digests of what ranks must have in common.

    That is the kinds of all collectives and, for each group, the sizes of those over it.
    """
    collectives = () if program is None else program.collectives
    kinds = None if program is None else [each.kind for each in collectives]
    facts: dict[str, Any] = {"": kinds}
    for each in collectives:
        facts.setdefault(each.group, []).append(each.elements)
    return {name: hashlib.sha256(repr(each).encode()).hexdigest() for name, each in facts.items()}
