"""All ranks capture a step, or none does: their programs must start the same collectives."""

import hashlib
from collections.abc import Callable
from typing import Any

import attrs
from keras import Model

from shardcore.binding.ranks.session import Session
from shardcore.domain.capture import Event
from shardcore.ports.capture import Program, RecordedSum, RecordedSums, StepCapture, StepTrace

_OTHERS = "the ranks start other collectives, or some of them alone in a CUDA graph"


@attrs.frozen
class Outcome:
    """The outcome of recording a step.

    Args:
        event: What happened to the step.
        program: The step, where its trace matched an earlier one.
        reason: Why the step is refused.
        is_first: Whether this rank has no other trace: the recording may be postponed.
    """

    event: Event
    program: Program | None = None
    reason: str = ""
    is_first: bool = False


def gather_from_ranks(value: object, session: Session | None) -> list[Any]:
    """Exchanges a value with all ranks, in their order; on one device there is one."""
    return [value] if session is None else session.processes.gather(value)


def agree_on_outcome(
    make: Callable[[RecordedSums | None], Outcome],
    trace: StepTrace,
    session: Session | None,
) -> Outcome:
    """Exchanges outcomes, and lets the worst one win: no rank alone has a program.

    Args:
        make: Makes the outcome of this rank, by these all-reduces; by its own if None.
        trace: What the step did.
        session: The session of the step; None on one device.
    """
    outcome = make(_all_reduces(trace, session))
    own = (outcome.event, outcome.reason, _digests(outcome.program), outcome.is_first)
    everyone = gather_from_ranks(own, session)
    events = {event for event, *_ in everyone}
    if Event.REFUSED in events:
        return Outcome(Event.REFUSED, reason=next(reason for _, reason, *_ in everyone if reason))
    if Event.SKIPPED in events:
        return Outcome(Event.SKIPPED)
    if Event.POSTPONED in events:
        # Python state may change on one rank alone, which begins again: the others have a trace.
        begin = all(is_first for *_, is_first in everyone)
        return Outcome(Event.POSTPONED if begin else Event.RECORDED)
    if events != {Event.MATCHED}:
        return Outcome(Event.DIFFERED if Event.DIFFERED in events else Event.RECORDED)
    digests_by_name: dict[str, set[str]] = {}
    for name, digest in (pair for _, _, digests, _ in everyone for pair in digests.items()):
        digests_by_name.setdefault(name, set()).add(digest)
    if any(len(digests) > 1 for digests in digests_by_name.values()):
        return Outcome(Event.REFUSED, reason=_OTHERS)
    return outcome


def _all_reduces(trace: StepTrace, session: Session | None) -> RecordedSums | None:
    """Takes the maximum of all ranks for each all-reduce; None if their numbers differ.

    By these every rank fills its buckets, so that ranks with shards of other sizes, or with more
    calls, join the same (ADR 38).
    """
    everyone = gather_from_ranks(trace.all_reduces, session)
    if len({len(sums) for sums in everyone}) > 1:
        return None
    return tuple(
        RecordedSum(
            max(recorded.bytes for recorded in same), max(recorded.calls for recorded in same)
        )
        for same in zip(*everyone, strict=True)
    )


def _digests(program: Program | None) -> dict[str, str]:
    # Ranks of one group must start collectives of equal sizes; all ranks, the same kinds.
    collectives = () if program is None else program.collectives
    kinds = None if program is None else [collective.kind for collective in collectives]
    facts: dict[str, Any] = {"": kinds}
    for collective in collectives:
        facts.setdefault(collective.group, []).append(collective.elements)
    return {name: hashlib.sha256(repr(fact).encode()).hexdigest() for name, fact in facts.items()}


def settings_of(trainer: Model, capture: StepCapture[Any]) -> dict[str, str]:
    """Describes what decides whether steps are captured: it must be equal on all ranks."""
    return {
        "SHARDCORE_CAPTURE": f"at_once={capture.at_once}, audit={capture.audit_interval}",
        "compile(jit_compile=)": str(trainer.jit_compile),
        "compile(run_eagerly=)": str(bool(trainer.run_eagerly)),
    }
