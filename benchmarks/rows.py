"""Lines of the table, made of what was measured."""

from collections.abc import Iterator, Mapping, Sequence

import attrs
from attrs import frozen

from benchmarks.contender import EAGER, Contender, Goal
from benchmarks.rounds import Measured

RAN_IN_PYTHON = "ran in Python"


@frozen
class Row:
    """One figure, and what it is compared with.

    Attributes:
        section: What is compared: "decoder, data parallel".
        contender: Whose figure it is.
        value: The figure; None where there is none, and the note says why.
        unit: "s", "B", "requests" or "%", of which the value is a share.
        against: Whose figure it is divided by.
        ratio: The quotient.
        limit: What the ratio is not to pass.
        note: What else a reader must know.
    """

    section: str
    contender: str
    value: float | None = None
    unit: str = "s"
    against: str = ""
    ratio: float | None = None
    limit: float | None = None
    note: str = ""

    @property
    def verdict(self) -> str:
        """Returns whether the goal is met; a figure that is not what it is called meets none."""
        if self.limit is None or self.ratio is None:
            return ""
        return "met" if self.ratio <= self.limit and self.note != RAN_IN_PYTHON else "missed"


def times(
    section: str, contenders: Sequence[Contender], found: Mapping[str, Measured]
) -> Iterator[Row]:
    """Seconds per step; one line more for each further goal of a contender."""
    for contender in contenders:
        mine = found[contender.name]
        if mine.failure:
            yield Row(section, contender.name, note=mine.failure)
            continue
        note = RAN_IN_PYTHON if contender.captured and mine.layer_calls else ""
        goals = [goal for goal in contender.goals if goal.against in found]
        for goal in goals or [None]:
            yield _time(section, mine, goal, found, note)


def _time(
    section: str, mine: Measured, goal: Goal | None, found: Mapping[str, Measured], note: str
) -> Row:
    if goal is None:
        return Row(section, mine.name, mine.step, note=note)
    other = found[goal.against]
    ratio = None if other.failure else mine.ratio(other)
    return Row(section, mine.name, mine.step, "s", goal.against, ratio, goal.limit, note)


def memory(section: str, peer: str, found: Mapping[str, Measured]) -> Iterator[Row]:
    """Bytes: what is stored against theory, and what a step needs against the peer."""
    asked = [each for each in found.values() if each.memory]
    for each in asked:
        stored = each.memory["stored"]
        ratio = stored / each.memory["share"]
        yield Row(section, f"{each.name}: stored", stored, "B", "ideal share", ratio, 1.001)
    for what in ("step", "process"):
        for each in asked:
            mine = Row(section, f"{each.name}: peak of {what}", each.memory[what], "B")
            yield mine if each.name == peer else _against(peer, mine, found, what)


def _against(peer: str, mine: Row, found: Mapping[str, Measured], what: str) -> Row:
    theirs = found[peer].memory.get(what) if peer in found else None
    if not theirs or mine.value is None:
        return mine
    limit = None if mine.contender.startswith(EAGER) else 1.0
    return attrs.evolve(mine, against=peer, ratio=mine.value / theirs, limit=limit)
