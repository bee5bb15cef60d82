"""Events of a step, as one rank runs it: operators, collectives, and the memory that they take.

An event may belong to a block: a layer that repeats. The time is a count of events.
"""

from collections import Counter
from collections.abc import Collection
from typing import Literal, TypeAlias

import attrs

from shardcore.domain.cost.reasons import CollectiveFacts
from shardcore.domain.layouts.mesh import Mesh
from shardcore.domain.layouts.variable_size import ShardedVariable

Kind: TypeAlias = Literal[
    "variables", "optimizer", "batch", "gradients", "activations", "collectives"
]


@attrs.frozen
class Allocation:
    """A piece of memory.

    Args:
        kind: What it is for.
        bytes: Its size.
        begin: The time from which it is held, in any unit.
        end: The time from which it is free, None if it is held to the end.
    """

    kind: Kind
    bytes: int
    begin: int
    end: int | None = None


def highest(allocations: Collection[Allocation]) -> dict[Kind, int]:
    """Finds the first time at which most bytes are held, and sums the bytes then by kind.

    Example:
        >>> held = [Allocation("variables", 8, 0), Allocation("activations", 6, 1, 3)]
        >>> highest([*held, Allocation("gradients", 4, 2), Allocation("activations", 5, 3)])
        {'variables': 8, 'activations': 6, 'gradients': 4}
    """
    changes: Counter[int] = Counter()
    for allocation in allocations:
        changes[allocation.begin] += allocation.bytes
        if allocation.end is not None:
            changes[allocation.end] -= allocation.bytes
    held, most, at = 0, 0, 0
    for time in sorted(changes):
        held += changes[time]
        if held > most:
            most, at = held, time
    sizes: dict[Kind, int] = {}
    for allocation in allocations:
        if allocation.begin <= at and (allocation.end is None or allocation.end > at):
            sizes[allocation.kind] = sizes.get(allocation.kind, 0) + allocation.bytes
    return sizes


# The time between two events: what is added to a trace fits between them.
TICK = 64


@attrs.frozen
class Work:
    """Equal operators of a step, on this rank's shards.

    Args:
        operator: The operator: "aten.mm.default".
        dtype: The dtype in which it computes.
        flops: The operations of a matrix product, a convolution or an attention; else 0.
        bytes: The bytes that it reads and writes: its operands and its results.
        updates: Whether it belongs to the update of the optimizer.
        times: The number of such operators.
    """

    operator: str
    dtype: str
    flops: int
    bytes: int
    updates: bool
    times: int = 1


@attrs.frozen
class BlockSpan:
    """A part of the step in which one block runs, up to the next part.

    Args:
        begin: Its first time.
        block: The path of the block that runs; empty outside of all.
    """

    begin: int
    block: str = ""


@attrs.frozen
class Operators:
    """Equal operators of one block.

    Args:
        work: What they do.
        block: Their block; empty if they belong to none, or to several.
        shares: Of operators of several blocks, the bytes by block.
    """

    work: Work
    block: str = ""
    shares: tuple[tuple[str, int], ...] = ()


@attrs.frozen
class TracedCollective:
    """A collective.

    Args:
        facts: The facts about it, with mesh axes and without processes.
        time: The time.
        block: Its block.
        dtype: The dtype of its operands.
        shares: Of one with operands of several blocks, the bytes by block.
    """

    facts: CollectiveFacts
    time: int
    block: str = ""
    dtype: str = ""
    shares: tuple[tuple[str, int], ...] = ()

    def relocated(self, block: str, other: str) -> "TracedCollective":
        """Renames the block: the same collective in an equal one, at time 0."""
        facts = attrs.evolve(
            self.facts,
            layer=_relocated_path(self.facts.layer, block, other),
            variable=self.facts.variable and _relocated_path(self.facts.variable, block, other),
            reduced=tuple(_relocated_path(path, block, other) for path in self.facts.reduced),
        )
        return attrs.evolve(self, facts=facts, time=0, block=other)


@attrs.frozen
class TracedMemory:
    """A piece of memory.

    Args:
        allocation: Its size, and when it is held.
        block: Its block.
        stored: The tensor of a variable that it is, None for another one.
        sum_of: The path of the variable whose gradient's all-reduce allocates it; empty for others.
        shares: Of a tensor that joins those of several blocks, the bytes by block.
    """

    allocation: Allocation
    block: str = ""
    stored: ShardedVariable | None = None
    sum_of: str = ""
    shares: tuple[tuple[str, int], ...] = ()

    def relocated(self, block: str, other: str) -> "TracedMemory":
        """Renames the block: the same memory in an equal one."""
        stored, sum_of = self.stored, _relocated_path(self.sum_of, block, other)
        if stored is not None:
            stored = attrs.evolve(stored, path=_relocated_path(stored.path, block, other))
        return attrs.evolve(self, block=other, stored=stored, sum_of=sum_of)


@attrs.frozen
class TracedStep:
    """A step as the first rank of a small mesh runs it; each gradient is all-reduced by itself.

    Args:
        mesh: The small mesh.
        operators: The operators, in no order.
        collectives: The collectives, in order.
        memory: The memory.
        spans: The parts of the step, by the block that runs, in order.
        end_of_pass: The time at which the backward pass waits for the gradients.
    """

    mesh: Mesh
    operators: tuple[Operators, ...]
    collectives: tuple[TracedCollective, ...]
    memory: tuple[TracedMemory, ...]
    spans: tuple[BlockSpan, ...] = (BlockSpan(0),)
    end_of_pass: int = 0


def _relocated_path(path: str, block: str, other: str) -> str:
    """Replaces the block at the beginning of a path by another one."""
    is_in = path == block or path.startswith(f"{block}/")
    return other + path[len(block) :] if is_in else path
