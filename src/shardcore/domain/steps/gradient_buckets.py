"""Buckets of gradients: which gradients one all-reduce sums, and the memory that it takes.

A trace reduces each gradient by itself, and this module forms the buckets, for a step on another
mesh has other ones. The rules are those of `adapters.engine.gradients.Buckets`.
"""

from collections import Counter
from collections.abc import Iterable, Sequence

import attrs

from shardcore.domain.steps.events import TICK, Held, Operators, Started, Work
from shardcore.domain.steps.memory import Allocation

# The bytes of a full bucket, as in `DistributedDataParallel`: large enough that the latency of a
# collective is negligible.
BUCKET_BYTES = 25 * 1024 * 1024


@attrs.frozen
class Sum:
    """The all-reduce of one gradient: over one axis after the other, if there are several.

    Args:
        path: The path of the variable.
        started: The collectives, one for each axis.
        held: The memory of their results.
    """

    path: str
    started: tuple[Started, ...]
    held: tuple[Held, ...]

    @property
    def bytes(self) -> int:
        """The bytes of the gradient."""
        return self.started[0].facts.operand_bytes

    @property
    def alike(self) -> tuple[str, tuple[tuple[str, ...], ...]]:
        """Dtype and axes, which all gradients of a bucket share."""
        return self.started[0].dtype, tuple(each.facts.axes for each in self.started)


@attrs.frozen
class Bucket:
    """Gradients that are reduced together.

    Args:
        sums: The gradients.
        full: Whether it is sent when it is full; the others are sent at the end of the pass.
    """

    sums: tuple[Sum, ...]
    full: bool


def filled(sums: Iterable[Sum], size: int = BUCKET_BYTES) -> list[Bucket]:
    """Returns the buckets of gradients that come in this order, in the order of sending.

    Example:
        >>> from shardcore.domain.explanation.reasons import Facts
        >>> sums = [
        ...     Sum(path, (Started(Facts("all_reduce", operand_bytes=4), 0),), ()) for path in "abc"
        ... ]
        >>> [("".join(each.path for each in b.sums), b.full) for b in filled(sums, size=8)]
        [('ab', True), ('c', False)]
    """
    found: list[Bucket] = []
    waiting: dict[object, list[Sum]] = {}
    held: Counter[object] = Counter()  # the bytes of those that wait
    for each in sums:
        alike = each.alike
        waiting.setdefault(alike, []).append(each)
        held[alike] += each.bytes
        if held[alike] >= size:
            found.append(Bucket(tuple(waiting.pop(alike)), full=True))
            del held[alike]
    return found + [Bucket(tuple(rest), full=False) for rest in waiting.values()]


@attrs.frozen
class Bucketed:
    """The part of a step that buckets make, in place of the all-reduces of single gradients."""

    operators: tuple[Operators, ...]
    collectives: tuple[Started, ...]
    memory: tuple[Allocation, ...]


def bucketed(buckets: Sequence[Bucket], end_of_pass: int) -> Bucketed:
    """Returns the operators, the collectives and the memory of buckets.

    A bucket joins its gradients in one tensor, which is reduced, and freed. At the end of the pass
    each is waited for, and reduced over its further axes.
    """
    operators: list[Operators] = []
    collectives: list[Started] = []
    memory: list[Allocation] = []
    waits = iter(_waits(buckets))
    for number, bucket in enumerate(buckets):
        first, last = bucket.sums[0], bucket.sums[-1]
        size = sum(each.bytes for each in bucket.sums)
        time = last.started[0].time if bucket.full else end_of_pass + 4 * number % TICK
        times = [time, *(next(waits) for _ in first.started[1:])]
        if len(bucket.sums) > 1:
            joined = Work("aten.cat.default", first.started[0].dtype, 0, 2 * size, updates=False)
            operators.append(Operators(joined))
            memory.append(Allocation("activations", size, time + 1, time + 3))
        for at, (begin, started) in enumerate(zip(times, first.started, strict=True)):
            paths = tuple(each.path for each in bucket.sums)
            facts = attrs.evolve(started.facts, reduced=paths, operand_bytes=size)
            collectives.append(attrs.evolve(started, facts=facts, time=begin))
            end = times[at + 1] + 3 if at + 1 < len(times) else _end(bucket, at)
            memory.append(Allocation(first.held[at].allocation.kind, size, begin + 2, end))
    return Bucketed(tuple(operators), tuple(collectives), tuple(memory))


def _waits(buckets: Sequence[Bucket]) -> list[int]:
    """Returns the times of the reductions over further axes: in a row, where the trace has them."""
    traced = [each.time for bucket in buckets for one in bucket.sums for each in one.started[1:]]
    count = sum(len(bucket.sums[0].started[1:]) for bucket in buckets)
    span = max(traced) - min(traced) if traced else 0
    return [min(traced) + number * span // count for number in range(count)]


def _end(bucket: Bucket, at: int) -> int | None:
    """Returns the time at which the last gradient of a bucket is free."""
    ends = [each.held[at].allocation.end for each in bucket.sums]
    return None if None in ends else max(end for end in ends if end is not None)
