"""All ranks capture a step, or none does: they compare what they would start."""

import hashlib
from typing import Any

from shardcore.binding.session import Session
from shardcore.domain.capture import NotCaptured
from shardcore.ports.capture import Program, Recording

# Why a step is not captured of which each rank would start something else.
DIFFERENT = "the ranks start other collectives"


def all_agree(reason: str, program: Program | None, session: Session | None) -> bool:
    """Whether the programs of all ranks start the same collectives, in one order.

    Args:
        reason: Why this rank has no program and never will; empty if there is no such reason.
        program: What this rank would run.
        session: That of the step; None on one device.

    Raises:
        NotCaptured: If a rank has such a reason: the first one's.
    """
    if session is None or session.mesh.size == 1:
        everyone = [(reason, _told(program))]
    else:
        everyone = session.processes.gather((reason, _told(program)))
    if first := next((each for each, _ in everyone if each), ""):
        raise NotCaptured(first)
    told: dict[str, set[str]] = {}
    for name, digest in (pair for _, pairs in everyone for pair in pairs.items()):
        told.setdefault(name, set()).add(digest)
    return all(len(digests) == 1 for digests in told.values())


def most_sent(recording: Recording, session: Session | None) -> tuple[int, ...]:
    """The bytes of each all-reduce, of the rank that sends most.

    Raises:
        NotCaptured: If the ranks did not do as many.
    """
    own = recording.sent
    if session is None or session.mesh.size == 1:
        return own
    everyone = session.processes.gather(own)
    if len({len(each) for each in everyone}) > 1:
        raise NotCaptured(DIFFERENT)
    return tuple(map(max, *everyone))


def _told(program: Program | None) -> dict[str, str]:
    """What ranks must have in common: the kinds of collectives, and for each group their sizes."""
    started = () if program is None else program.collectives
    facts: dict[str, Any] = {"": None if program is None else [each.kind for each in started]}
    for each in started:
        facts.setdefault(each.group, []).append(each.elements)
    return {name: hashlib.sha256(repr(each).encode()).hexdigest() for name, each in facts.items()}
