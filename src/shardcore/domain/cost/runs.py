"""Equal blocks in a row of a model, and a check that their traces are equal."""

import re
from bisect import bisect_right
from collections import Counter
from collections.abc import Hashable, Iterator

import attrs

from shardcore.domain.cost.events import TICK, TracedCollective, TracedMemory, TracedStep

_NUMBER = re.compile(r"_\d+(?=/|$)")


@attrs.frozen
class Run:
    """Equal blocks in a row, some of which are traced.

    Args:
        paths: The paths of all blocks, in order.
        reach: The number of blocks after which the memory of a block is free at the latest.
        first: The number of blocks at the beginning that may differ from the inner ones.
        last: The number of blocks at the end that may.

    Example:
        >>> run = Run(tuple("abcdefgh"))
        >>> run.traced, run.copied
        (('a', 'b', 'g', 'h'), ('c', 'd', 'e', 'f'))
    """

    paths: tuple[str, ...]
    reach: int = 1
    first: int = 1
    last: int = 1

    @property
    def traced_before(self) -> int:
        """The number of traced blocks before the copies: the first ones, and inner ones."""
        return self.first + self.reach

    @property
    def inner(self) -> range:
        """The positions of the inner blocks among the traced ones, from 1: they must be equal."""
        return range(self.first + 1, self.first + 2 * self.reach + 1)

    @property
    def traced_after(self) -> int:
        """The number of traced blocks after the copies: inner ones, and the last ones."""
        return self.reach + self.last

    @property
    def traced(self) -> tuple[str, ...]:
        """The paths of the traced blocks, in order: all, if there are not more."""
        if len(self.paths) <= self.traced_before + self.traced_after:
            return self.paths
        return self.paths[: self.traced_before] + self.paths[len(self.paths) - self.traced_after :]

    @property
    def copied(self) -> tuple[str, ...]:
        """The paths of the other blocks."""
        return self.paths[
            self.traced_before : max(self.traced_before, len(self.paths) - self.traced_after)
        ]


@attrs.frozen
class Part:
    """A part of the trace.

    Args:
        begin: Its first time.
        length: Its length.
        at: The position of its block among the traced ones, from 1; 0 outside of all.
        turn: Its number among the parts of that block, or among those outside.
        block: The block that runs, also one of another run.
    """

    begin: int
    length: int
    at: int
    turn: int
    block: str


@attrs.frozen
class Point:
    """A time, relative to a part: its block and turn, and the time since its beginning."""

    at: int
    turn: int
    since: int


@attrs.define
class TracedRun:
    """The blocks of a run in a trace, and the parts of the trace."""

    step: TracedStep
    run: Run
    parts: list[Part] = attrs.field(init=False)
    # The positions of blocks among the traced ones, from 1, by path.
    positions: dict[str, int] = attrs.field(init=False)
    _begins: list[int] = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        self.positions = {path: at for at, path in enumerate(self.run.traced, 1)}
        self.parts = list(self._parts())
        self._begins = [part.begin for part in self.parts]

    def _parts(self) -> Iterator[Part]:
        turns: Counter[int] = Counter()
        spans = self.step.spans
        for span, after in zip(spans, [*spans[1:], None], strict=True):
            at = self.positions.get(span.block, 0)
            end = self._last_time() + TICK if after is None else after.begin
            yield Part(span.begin, end - span.begin, at, turns[at], span.block)
            turns[at] += 1

    def _last_time(self) -> int:
        allocations = (held.allocation for held in self.step.memory)
        times = [max(allocation.begin, allocation.end or 0) for allocation in allocations]
        return max([*times, *(collective.time for collective in self.step.collectives)], default=0)

    def point(self, time: int) -> Point:
        """Converts a time to one relative to its part."""
        part = self.parts[max(bisect_right(self._begins, time) - 1, 0)]
        return Point(part.at, part.turn, time - part.begin)

    def inner_are_equal(self) -> bool:
        """Tells whether the inner blocks do the same, at the same times relative to them."""
        inner = [self._signature(at) for at in self.run.inner]
        if any(signature is None or signature != inner[0] for signature in inner):
            return False
        # When the memory of one is free in another one, both of them inner ones.
        ends = [[self._relative_end(held) for held in self._memory_of(at)] for at in self.run.inner]
        same = ({end for end in alike if end is not None} for alike in zip(*ends, strict=True))
        return all(len(times) < 2 for times in same)

    def _memory_of(self, at: int) -> list[TracedMemory]:
        return [held for held in self.step.memory if self.positions.get(held.block) == at]

    def _relative_end(self, held: TracedMemory) -> int | None:
        end = held.allocation.end
        point = None if end is None else self.point(end)
        return point.since if point is not None and point.at in self.run.inner else None

    def _signature(self, at: int) -> Hashable:
        """Lists all that a block does, without its name; None if it cannot repeat."""
        name = self.run.traced[at - 1]
        parts = tuple((part.turn, part.length) for part in self.parts if part.at == at)
        operators: Counter[Hashable] = Counter()
        for per_block in self.step.operators:
            if per_block.block == name:
                operators[attrs.evolve(per_block.work, times=1)] += per_block.work.times
            elif name in dict(per_block.shares):
                operators[per_block.work, dict(per_block.shares)[name]] += 1
        collectives = tuple(
            (self._relative_time(collective.time, at), _without_block_names(collective, name))
            for collective in self.step.collectives
            if collective.block == name
        )
        memory = [self._relative_memory(held, at) for held in self._memory_of(at)]
        joined = (dict(held.shares) for held in self.step.memory)
        shared = tuple(shares[name] for shares in joined if name in shares)
        if None in memory:
            return None
        return parts, frozenset(operators.items()), collectives, tuple(memory), shared

    def _relative_memory(self, held: TracedMemory, at: int) -> Hashable:
        allocation, end, name = held.allocation, held.allocation.end, self.run.traced[at - 1]
        stored = held.stored and attrs.evolve(held.stored, path="")  # it has the name of the block
        sum_of = _without_numbers(held.sum_of.removeprefix(name))
        what = allocation.kind, allocation.bytes, stored, sum_of, held.shares
        begin = self._relative_time(allocation.begin, at)
        if end is None:
            return what, begin
        point = self.point(end)
        if not point.at:
            return what, begin, point.turn
        distance = point.at - at
        return None if abs(distance) > self.run.reach else (what, begin, distance, point.turn)

    def _relative_time(self, time: int, at: int) -> tuple[int, int] | int:
        point = self.point(time)
        return (point.turn, point.since) if point.at == at else point.turn


def _without_block_names(started: TracedCollective, block: str) -> TracedCollective:
    """Removes the names by which equal blocks differ."""
    renamed = started.relocated(block, "")
    facts = attrs.evolve(
        renamed.facts,
        layer=_without_numbers(renamed.facts.layer),
        variable=renamed.facts.variable and _without_numbers(renamed.facts.variable),
        reduced=tuple(map(_without_numbers, renamed.facts.reduced)),
    )
    return attrs.evolve(renamed, facts=facts)


def _without_numbers(path: str) -> str:
    """Removes the numbers that Keras counts on from block to block.

    Example:
        >>> _without_numbers("block/dense_12/kernel")
        'block/dense/kernel'
    """
    return _NUMBER.sub("", path)
