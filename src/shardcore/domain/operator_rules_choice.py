"""How an operator is split, given a rule and how its operands lie.

Each mesh axis is decided on its own: it splits one factor, or none. Only a factor that an operand
is split by already comes into question, and of these the cheapest: what operands move to get there,
and results to get where they are wanted. No rank is left without an element, and no block is cut.
"""

from collections.abc import Iterator
from functools import lru_cache
from math import prod

import attrs

from shardcore.domain.errors import LayoutError
from shardcore.domain.operator_rules import OperatorRule, Result, Term
from shardcore.domain.placements import Partial, Placement, Replicate, Shard
from shardcore.domain.redistribution import START_BYTES, transition


@attrs.frozen
class Placed:
    """A tensor on a mesh.

    Args:
        shape: Its global shape.
        placements: What each mesh axis does to it.
        itemsize: The bytes of one element.
    """

    shape: tuple[int, ...]
    placements: tuple[Placement, ...]
    itemsize: int = 4


@attrs.frozen
class Split:
    """How an operator is split over a mesh.

    Args:
        factors: The factor that each mesh axis splits, None where the operator runs whole.
        operands: Per operand the placements that it has to be brought into.
        results: Per result the placements in which it comes.
        extents: Each factor with its number of steps.
        gathers: Whether an operand that is split over an axis is made whole there.
    """

    factors: tuple[str | None, ...]
    operands: tuple[tuple[Placement, ...], ...]
    results: tuple[tuple[Placement, ...], ...]
    extents: tuple[tuple[str, int], ...]
    gathers: bool

    def global_shape(
        self, result: Result, local: tuple[int, ...], mesh: tuple[int, ...], at: tuple[int, ...]
    ) -> tuple[int, ...]:
        """The global shape of `result`, of whose parts the rank at coordinate `at` has `local`."""
        steps = dict(self.extents)
        return tuple(
            size
            if dim.factor is None
            else size // self._local_steps(dim.factor, mesh, at) * steps[dim.factor]
            for dim, size in zip(result.dims, local, strict=True)
        )

    def _local_steps(self, factor: str, mesh: tuple[int, ...], at: tuple[int, ...]) -> int:
        steps = dict(self.extents)[factor]
        for ranks, position, each in zip(mesh, at, self.factors, strict=True):
            if each == factor:
                chunk = -(-steps // ranks)
                steps = min(chunk, steps - position * chunk)
        return max(steps, 1)


@lru_cache(maxsize=4096)
def split(
    rule: OperatorRule,
    mesh: tuple[int, ...],
    operands: tuple[Placed, ...],
    result_shapes: tuple[tuple[int, ...], ...] = (),
) -> Split:
    """The cheapest split of an operator, by the costs of `redistribution.plan`.

    Args:
        rule: The rule of the operator.
        mesh: The number of ranks along each axis.
        operands: The operands, in the order of the rule.
        result_shapes: The global shapes of the results, where it depends on the factor how they
            lie: they say what it costs to reduce sums, and to bring gradients to their operands.

    Raises:
        LayoutError: If the operands do not have the dims of the rule, or dims of one factor differ.

    Example:
        >>> from shardcore.domain.operator_rules import Operand
        >>> rule = OperatorRule((Operand("x", "n c"), Operand("w", "c o")), (Result("y", "n o"),))
        >>> x, w = Placed((8, 4), (Replicate(),)), Placed((4, 6), (Shard(0),))
        >>> chosen = split(rule, (2,), (x, w))
        >>> chosen.factors, str(chosen.operands[0][0]), str(chosen.results[0][0])
        (('c',), 'S(1)', 'P(sum)')
    """
    extents = _extents(rule, operands)
    # The sizes that a factor's parts have after the axes decided so far.
    parts = {factor: frozenset({steps}) for factor, steps in extents.items()}
    factors: list[str | None] = []
    for axis, ranks in enumerate(mesh):
        fitting = {
            factor: cut
            for factor in _in_question(rule, operands, axis)
            if (cut := _cut(parts[factor], rule.blocks(factor), ranks))
        }
        costs = {f: _cost(rule, mesh, axis, operands, result_shapes, f) for f in fitting}
        chosen = min(costs, key=lambda factor: costs[factor], default=None)
        if chosen is not None:
            parts[chosen] = fitting[chosen]
        factors.append(chosen)
    return Split(
        tuple(factors),
        tuple(_placements(rule, term, factors) for term in rule.operands),
        tuple(_placements(rule, term, factors) for term in rule.results),
        tuple(extents.items()),
        any(
            factor is None and ranks > 1 and _is_split(operands, axis)
            for axis, (factor, ranks) in enumerate(zip(factors, mesh, strict=True))
        ),
    )


def _extents(rule: OperatorRule, operands: tuple[Placed, ...]) -> dict[str, int]:
    """The number of steps of each factor, which all operands have to agree on."""
    extents: dict[str, int] = {}
    for term, operand in zip(rule.operands, operands, strict=True):
        if len(term.dims) != len(operand.shape):
            raise LayoutError(
                f"Operand {term.name!r} of rule '{rule}' has {len(term.dims)} dims, got shape "
                f"{operand.shape}."
            )
        for dim, size in zip(term.dims, operand.shape, strict=True):
            if dim.factor is None:
                continue
            steps, rest = divmod(size, dim.block)
            if rest or extents.setdefault(dim.factor, steps) != steps:
                raise LayoutError(
                    f"Operand {term.name!r} of rule '{rule}' has shape {operand.shape}: factor "
                    f"{dim.factor!r} would have to be of {extents.get(dim.factor)} steps."
                )
    return extents


def _in_question(rule: OperatorRule, operands: tuple[Placed, ...], axis: int) -> Iterator[str]:
    """The factors that `axis` splits an operand by already, in the order of the operands."""
    for term, operand in zip(rule.operands, operands, strict=True):
        placement = operand.placements[axis]
        if isinstance(placement, Shard):
            factor = term.dims[placement.dim].factor
            if factor is not None:
                yield factor


def _is_split(operands: tuple[Placed, ...], axis: int) -> bool:
    return any(isinstance(operand.placements[axis], Shard) for operand in operands)


def _cut(sizes: frozenset[int], blocks: frozenset[int], ranks: int) -> frozenset[int] | None:
    """The sizes that `sizes` have in chunks; None if a chunk is empty or cuts a block."""
    found: set[int] = set()
    for size in sizes:
        chunk = -(-size // ranks)
        last = size - chunk * (ranks - 1)
        if last <= 0 or any(-(-size * block // ranks) != chunk * block for block in blocks):
            return None
        found |= {chunk, last}
    return frozenset(found)


def _placements(rule: OperatorRule, term: Term, factors: list[str | None]) -> tuple[Placement, ...]:
    return tuple(_placement(rule, term, factor) for factor in factors)


def _placement(rule: OperatorRule, term: Term, factor: str | None) -> Placement:
    """What an axis that splits `factor` does to an operand or a result."""
    if factor is None:
        return Replicate()
    if factor in term.factors:
        return Shard(term.dim_of(factor))
    if isinstance(term, Result):
        return Partial("sum") if factor in rule.sums(term) else Replicate()
    added = getattr(term, "added", False)
    summed = any(factor in rule.sums(result) for result in rule.results)
    return Partial("sum") if added and summed else Replicate()


def _cost(
    rule: OperatorRule,
    mesh: tuple[int, ...],
    axis: int,
    operands: tuple[Placed, ...],
    result_shapes: tuple[tuple[int, ...], ...],
    factor: str,
) -> float:
    """What it costs to bring operands and results along `axis` where a split of `factor` wants."""
    placed = {term.name: each for term, each in zip(rule.operands, operands, strict=True)}
    moves = [
        (placed[term.name], placed[term.name].placements[axis], _placement(rule, term, factor))
        for term in rule.operands
    ]
    for result, shape in zip(rule.results, result_shapes, strict=False):
        source = _placement(rule, result, factor)
        like = placed[result.like].placements[axis] if result.like else source
        target = Replicate() if isinstance(like, Partial) else like
        whole = Placed(shape, (Replicate(),) * len(mesh), operands[0].itemsize)
        moves.append((whole, source, target))
    return sum(
        _sent(source, target, mesh[axis], _bytes(each, mesh, axis))
        for each, source, target in moves
    )


def _bytes(operand: Placed, mesh: tuple[int, ...], axis: int) -> float:
    """The bytes that the ranks of one group along `axis` hold together."""
    others = prod(
        ranks
        for other, (ranks, placement) in enumerate(zip(mesh, operand.placements, strict=True))
        if other != axis and isinstance(placement, Shard)
    )
    return prod(operand.shape) * operand.itemsize / others


def _sent(source: Placement, target: Placement, ranks: int, held: float) -> float:
    """The bytes that a rank sends of `held`, and the start; see docs/transitions.md."""
    if source != target and isinstance(target, Partial):  # made of the whole
        target = Replicate()
    kind = transition(source, target)
    if kind in (None, "slice") or ranks == 1:
        return 0.0
    sent = held * (ranks - 1) / ranks
    if kind == "all_reduce":
        sent *= 2
    elif kind == "all_to_all":
        sent /= ranks
    return START_BYTES + sent
