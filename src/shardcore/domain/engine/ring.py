"""Shardings of an operator whose ranks pass shards of some operands on, in a ring.

Attention is one (ADR 43): a rank has some queries, and meets the keys of one rank after the other.
So one mesh axis shards two factors of its rule, the queries and the keys, and no result is a
partial sum.
"""

from collections.abc import Iterable, Sequence
from math import prod
from typing import Literal, TypeAlias

import attrs

from shardcore.domain.cost.collective_cost import Costs
from shardcore.domain.engine.call import PlacedTensor
from shardcore.domain.engine.choice import Sharding, choose
from shardcore.domain.engine.rules.rule import OperatorRule, Term
from shardcore.domain.layouts.layout import Layout
from shardcore.domain.layouts.placements import Blocks, blocks_of

# The keys of another rank that a query attends to: all, those up to the query's own position, those
# before it, or none.
KeyBlock: TypeAlias = Literal["all", "causal", "earlier", "none"]


@attrs.frozen
class Ring:
    """A mesh axis around which parts are passed on.

    Args:
        axis: The mesh axis.
        factors: The factors of the rule that it shards. Nothing else shards them.
        causal: Whether an element of the first meets only those of the others up to its own number.
    """

    axis: str
    factors: frozenset[str]
    causal: bool = False

    @classmethod
    def of(
        cls, operands: Iterable[Layout], dim: int, factors: frozenset[str], *, causal: bool
    ) -> "Ring | None":
        """Finds the axis that alone shards `dim` of all operands; None without one.

        Example:
            >>> from shardcore.domain.layouts.mesh import Mesh
            >>> part = Layout(Mesh((2, 2), ("data", "seq")), ("data", "seq"))
            >>> ring = Ring.of([part, part], 1, frozenset("qk"), causal=False)
            >>> ring.axis, Ring.of([part, part.without("seq")], 1, ring.factors, causal=False)
            ('seq', None)
        """
        first, *others = operands
        axes = first.dim_axes(dim)
        if len(axes) != 1 or first.mesh.axis_size(axes[0]) == 1:
            return None
        same = all(other.dim_axes(dim) == axes for other in others)
        return cls(axes[0], factors, causal) if same else None

    def sharding(
        self, rule: OperatorRule, operands: Sequence[PlacedTensor], costs: Costs
    ) -> Sharding:
        """Shards `factors` over `axis`, and chooses the cheapest sharding over the other axes.

        Example:
            >>> from shardcore.domain.layouts.mesh import Mesh
            >>> from shardcore.domain.engine.rules.rule import rule
            >>> mesh = Mesh((2, 2), ("data", "seq"))
            >>> part = PlacedTensor((4, 8), Layout(mesh, ("data", "seq")))
            >>> ring = Ring("seq", frozenset("qk"))
            >>> chosen = ring.sharding(rule("b q, b k -> b q"), (part, part), Costs())
            >>> str(chosen.operands[1]), str(chosen.results[0])
            ("('data', 'seq')", "('data', 'seq')")
        """
        inside = rule.without(self.factors)
        without_ring = (
            attrs.evolve(
                operand,
                layout=operand.layout.without(self.axis),
                other=operand.other and operand.other.without(self.axis),
            )
            for operand in operands
        )
        chosen = choose(inside, tuple(without_ring), costs=costs)
        first = attrs.evolve(operands[0], layout=chosen.operands[0])
        blocks = self._blocks(rule.operands[0], first, costs) if self.causal else 1
        operand_layouts, result_layouts = (
            tuple(self._with_ring_axis(*pair, blocks) for pair in zip(terms, layouts, strict=True))
            for terms, layouts in (
                (rule.operands, chosen.operands),
                (rule.results, chosen.results),
            )
        )
        sizes = {
            factor: operand.shape[term.dim_of(factor)]
            for term, operand in zip(rule.operands, operands, strict=True)
            for factor in self.factors & term.factors
        }
        return attrs.evolve(
            chosen,
            operands=operand_layouts,
            results=result_layouts,
            extents={**chosen.extents, **sizes},
        )

    def _with_ring_axis(self, term: Term, layout: Layout, blocks: Blocks) -> Layout:
        spec, of_dims = list(layout.spec), list(layout.blocks)
        for dim, rule_dim in enumerate(term.dims):
            if rule_dim.factor in self.factors:
                spec[dim], of_dims[dim] = self.axis, blocks
        return Layout(layout.mesh, tuple(spec), layout.partial, tuple(of_dims))

    def _blocks(self, term: Term, first: PlacedTensor, costs: Costs) -> Blocks:
        """Chooses stripes for a causal ring if they cost less than consecutive parts (ADR 43).

        In parts of `c` elements, the last of `n` ranks does the work of `n - 1/2` pairs of parts,
        in stripes each rank that of `n / 2`: it spares `(n - 1) / 2` pairs, in two products. The
        first operand, as large as each other, is exchanged, with two others and the result.
        """
        ranks = first.layout.mesh.axis_size(self.axis)
        dim = next(at for at, rule_dim in enumerate(term.dims) if rule_dim.factor in self.factors)
        count, rest = divmod(first.shape[dim], ranks)
        held = prod(first.layout.local_shape(first.shape, rank=0))
        spared = (ranks - 1) * count * held / ranks / costs.multiplications
        paid = 4 * costs.collective("all_to_all", self.axis, ranks, held * first.itemsize)
        return 1 if rest or paid > spared else blocks_of(count, 1)


def visible_keys(query_rank: int, key_rank: int, *, causal: bool, striped: bool) -> KeyBlock:
    """Tells which keys of `key_rank` the queries of `query_rank` attend to.

    In a causal attention a query attends to the keys up to its own position. If ranks have
    consecutive parts of the sequence, the last one has most keys. In stripes, rank `i` of `n` has
    the elements `i`, `i + n`, `i + 2n`, ..., so that all ranks have as many keys in each step.

    Example:
        >>> [visible_keys(1, key_rank, causal=True, striped=False) for key_rank in range(3)]
        ['all', 'causal', 'none']
        >>> [visible_keys(1, key_rank, causal=True, striped=True) for key_rank in range(3)]
        ['causal', 'causal', 'earlier']
    """
    if not causal:
        return "all"
    if striped:
        return "causal" if key_rank <= query_rank else "earlier"
    return "causal" if key_rank == query_rank else "all" if key_rank < query_rank else "none"
