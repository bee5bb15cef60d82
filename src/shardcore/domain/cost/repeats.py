"""A step with more blocks than were traced: the trace of some, with copies of one of them.

Blocks are equal layers, each fed by the one before. Inner ones do the same operators, forward and
backward: the trace has some of them, and all others are copies. What a block allocates may be freed
in a block some way off, as its output is in the next one (ADR 46).
"""

from collections.abc import Iterator, Sequence

import attrs

from shardcore.domain.cost.events import (
    BlockSpan,
    Operators,
    TracedCollective,
    TracedMemory,
    TracedStep,
)
from shardcore.domain.cost.runs import Point, Run, TracedRun


def with_all_blocks(step: TracedStep, run: Run) -> TracedStep | None:
    """Adds the blocks of `run` that were not traced; None if the inner ones of the trace differ."""
    return step if not run.copied else _LongerStep(TracedRun(step, run)).step()


@attrs.define
class _LongerStep:
    """Builds the longer step."""

    traced: TracedRun
    # The new beginnings of parts: by the position of the block among all, 0 outside, and the turn.
    _new: dict[tuple[int, int], int] = attrs.field(factory=dict, init=False)

    @property
    def run(self) -> Run:
        """The run."""
        return self.traced.run

    def step(self) -> TracedStep | None:
        """Builds the longer step; None if inner blocks differ."""
        if not self.traced.inner_are_equal() or not self._set_times():
            return None
        memory = list(self._memory())
        if None in memory:
            return None
        collectives = sorted(self._collectives(), key=lambda collective: collective.time)
        others = {part.turn: part.block for part in self.traced.parts if not part.at}
        spans = (
            BlockSpan(begin, self.run.paths[at - 1] if at else others[turn])
            for (at, turn), begin in self._new.items()
        )
        return TracedStep(
            self.traced.step.mesh,
            tuple(map(self._operators, self.traced.step.operators)),
            tuple(collectives),
            tuple(piece for piece in memory if piece is not None),
            tuple(sorted(spans, key=lambda span: span.begin)),
            self._time(self.traced.point(self.traced.step.end_of_pass)),
        )

    # The new times.

    def _set_times(self) -> bool:
        """Sets the new start of each part; returns whether neighbours follow one another."""
        before, copies = self.run.traced_before, len(self.run.copied)
        time, previous = self.traced.parts[0].begin, None
        for part in self.traced.parts:
            if previous is not None and {part.at, previous.at} == {before, before + 1}:
                if part.turn != previous.turn:
                    return False
                between = range(before + 1, before + copies + 1)
                for at in between if part.at > before else reversed(between):
                    self._new[at, part.turn] = time
                    time += part.length if previous.at == before else previous.length
            self._new[self._position(part.at), part.turn] = time
            time += part.length
            previous = part
        turns = sum(traced_part.at == before for traced_part in self.traced.parts)
        return all((at, turn) in self._new for at in self._copies() for turn in range(turns))

    def _copies(self) -> range:
        return range(self.run.traced_before + 1, self.run.traced_before + len(self.run.copied) + 1)

    def _position(self, at: int) -> int:
        """Converts a position among the traced blocks to one among all blocks."""
        return at if at <= self.run.traced_before else at + len(self.run.copied)

    def _time(self, point: Point, at: int | None = None) -> int:
        """Computes the new time of a point, in the block at position `at` if that is given."""
        position = self._position(point.at) if at is None else at
        return self._new[position, point.turn] + point.since

    # The events.

    def _operators(self, operators: Operators) -> Operators:
        name, copies = self._name(), len(self.run.copied)
        if operators.block == name:
            work = attrs.evolve(operators.work, times=operators.work.times * (1 + copies))
            return attrs.evolve(operators, work=work)
        share = dict(operators.shares).get(name)
        if share is None:
            return operators
        work = attrs.evolve(operators.work, bytes=operators.work.bytes + copies * share)
        added = ((path, share) for path in self.run.copied)
        return attrs.evolve(operators, work=work, shares=(*operators.shares, *added))

    def _collectives(self) -> Iterator[TracedCollective]:
        before = self.run.traced_before
        name = self._name()
        for collective in self.traced.step.collectives:
            point = self.traced.point(collective.time)
            added = len(self.run.copied) * dict(collective.shares).get(name, 0)
            facts = attrs.evolve(
                collective.facts, operand_bytes=collective.facts.operand_bytes + added
            )
            yield attrs.evolve(collective, time=self._time(point), facts=facts)
            if collective.block == name:
                for at, path in zip(self._copies(), self.run.copied, strict=True):
                    time = self._time(point, at if point.at == before else None)
                    yield attrs.evolve(collective.relocated(name, path), time=time)

    def _memory(self) -> Iterator[TracedMemory | None]:
        blocks: dict[int, list[TracedMemory]] = {at: [] for at in self.run.inner}
        for held in self.traced.step.memory:
            at = self.traced.positions.get(held.block, 0)
            yield self._retimed(held, at)
            if at in blocks:
                blocks[at].append(held)
        for alike in zip(*blocks.values(), strict=True):
            yield from self._copied(alike)

    def _retimed(self, held: TracedMemory, at: int) -> TracedMemory | None:
        """Moves traced memory to its new time; None if an inner block frees it alone."""
        allocation, end = held.allocation, None
        if allocation.end is not None:
            point = self.traced.point(allocation.end)
            distance = point.at - at
            if point.at and not at and point.at in self.run.inner:
                return None
            if point.at and at and abs(distance) > self.run.reach:
                return None
            end = self._time(point, self._position(at) + distance if point.at and at else None)
        added = len(self.run.copied) * dict(held.shares).get(self._name(), 0)
        begin = self._time(self.traced.point(allocation.begin))
        allocation = attrs.evolve(allocation, begin=begin, end=end, bytes=allocation.bytes + added)
        return attrs.evolve(held, allocation=allocation)

    def _name(self) -> str:
        return self.run.traced[self.run.traced_before - 1]

    def _copied(self, alike: Sequence[TracedMemory]) -> Iterator[TracedMemory]:
        """Yields the copies of memory that all inner blocks have.

        The copy of a block that frees earlier ones is that of the last inner block, whose end is in
        an inner block too; else that of the first. Memory that a block frees at once is left out:
        what is held around it grows, or falls, from block to block by the same, so that the highest
        point is in one of the traced blocks beside the copies.
        """
        first = self.run.inner[0]
        ends = [held.allocation.end for held in alike]
        end = None if ends[0] is None else self.traced.point(ends[0])
        backward = end is not None and end.at and end.at < first
        of, at = (alike[-1], self.run.inner[-1]) if backward else (alike[0], first)
        begin = self.traced.point(of.allocation.begin)
        end = None if of.allocation.end is None else self.traced.point(of.allocation.end)
        at_once = end is not None and begin.at and (begin.at, begin.turn) == (end.at, end.turn)
        for copy in () if at_once else self._copies():
            allocation = attrs.evolve(
                of.allocation,
                begin=self._time(begin, copy if begin.at else None),
                end=self._time(end, copy + end.at - at if end.at else None) if end else None,
            )
            yield attrs.evolve(
                of.relocated(of.block, self.run.paths[copy - 1]), allocation=allocation
            )
