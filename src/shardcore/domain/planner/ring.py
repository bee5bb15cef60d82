"""Shardings of an operator whose ranks pass shards of some operands on, in a ring.

Attention is one: a rank has some queries, and meets the keys of one rank after the other. So one
mesh axis shards two factors of its rule, the queries and the keys, and no result is a partial sum.
"""

from collections.abc import Iterable, Sequence
from math import prod
from typing import Literal, TypeAlias

import attrs

from shardcore.domain.layout import Layout
from shardcore.domain.machines.collective_cost import Costs
from shardcore.domain.placements import Blocks, blocks_of
from shardcore.domain.planner.call import Placed
from shardcore.domain.planner.choice import Sharding, choose
from shardcore.domain.rules.rule import OperatorRule, Term

# The keys of another rank that a query meets: all, those up to the query's own number, those before
# it, or none.
Met: TypeAlias = Literal["all", "causal", "earlier", "none"]


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
        """Returns the ring of the axis that alone shards `dim` of all operands; None without one.

        Example:
            >>> from shardcore.domain.mesh import Mesh
            >>> part = Layout(Mesh((2, 2), ("data", "seq")), ("data", "seq"))
            >>> ring = Ring.of([part, part], 1, frozenset("qk"), causal=False)
            >>> ring.axis, Ring.of([part, part.without("seq")], 1, ring.factors, causal=False)
            ('seq', None)
        """
        first, *others = operands
        axes = first.dim_axes(dim)
        if len(axes) != 1 or first.mesh.axis_size(axes[0]) == 1:
            return None
        same = all(each.dim_axes(dim) == axes for each in others)
        return cls(axes[0], factors, causal) if same else None

    def sharding(self, rule: OperatorRule, operands: Sequence[Placed], costs: Costs) -> Sharding:
        """Returns the sharding in which `axis` shards `factors`, and other axes what is cheapest.

        Example:
            >>> from shardcore.domain.mesh import Mesh
            >>> from shardcore.domain.rules.rule import rule
            >>> mesh = Mesh((2, 2), ("data", "seq"))
            >>> part = Placed((4, 8), Layout(mesh, ("data", "seq")))
            >>> ring = Ring("seq", frozenset("qk"))
            >>> chosen = ring.sharding(rule("b q, b k -> b q"), (part, part), Costs())
            >>> str(chosen.operands[1]), str(chosen.results[0])
            ("('data', 'seq')", "('data', 'seq')")
        """
        inside = rule.without(self.factors)
        kept = (
            attrs.evolve(
                each,
                layout=each.layout.without(self.axis),
                other=each.other and each.other.without(self.axis),
            )
            for each in operands
        )
        chosen = choose(inside, tuple(kept), costs=costs)
        first = attrs.evolve(operands[0], layout=chosen.operands[0])
        blocks = self._blocks(rule.operands[0], first, costs) if self.causal else 1
        given, found = (
            tuple(self._around(*pair, blocks) for pair in zip(terms, layouts, strict=True))
            for terms, layouts in (
                (rule.operands, chosen.operands),
                (rule.results, chosen.results),
            )
        )
        sizes = {
            factor: each.shape[term.dim_of(factor)]
            for term, each in zip(rule.operands, operands, strict=True)
            for factor in self.factors & term.factors
        }
        return attrs.evolve(
            chosen, operands=given, results=found, extents={**chosen.extents, **sizes}
        )

    def _around(self, term: Term, layout: Layout, blocks: Blocks) -> Layout:
        """Returns `layout` with the dims of the ring's factors sharded by its axis, in `blocks`."""
        spec, of_dims = list(layout.spec), list(layout.blocks)
        for dim, each in enumerate(term.dims):
            if each.factor in self.factors:
                spec[dim], of_dims[dim] = self.axis, blocks
        return Layout(layout.mesh, tuple(spec), layout.partial, tuple(of_dims))

    def _blocks(self, term: Term, first: Placed, costs: Costs) -> Blocks:
        """Returns the blocks of the dims of a causal ring: stripes, if they cost less than parts.

        In parts of `c` elements, the last of `n` ranks does the work of `n - 1/2` pairs of parts,
        in stripes each rank that of `n / 2`: it spares `(n - 1) / 2` pairs, in two products. The
        first operand, as large as each other, is exchanged, with two others and the result.
        """
        ranks = first.layout.mesh.axis_size(self.axis)
        dim = next(at for at, each in enumerate(term.dims) if each.factor in self.factors)
        count, rest = divmod(first.shape[dim], ranks)
        held = prod(first.layout.local_shape(first.shape, rank=0))
        spared = (ranks - 1) * count * held / ranks / costs.multiplications
        paid = 4 * costs.collective("all_to_all", self.axis, ranks, held * first.itemsize)
        return 1 if rest or paid > spared else blocks_of(count, 1)


def met(place: int, owner: int, *, causal: bool, striped: bool) -> Met:
    """Returns the keys that queries meet: those of `place`, and the keys that `owner` has.

    In a causal attention a query meets the keys up to its own place in the sequence. If ranks have
    consecutive parts of the sequence, the last one meets most keys. In stripes, rank `i` of `n` has
    the elements `i`, `i + n`, `i + 2n`, ..., so that all ranks meet as many keys in each step.

    Example:
        >>> [met(1, owner, causal=True, striped=False) for owner in range(3)]
        ['all', 'causal', 'none']
        >>> [met(1, owner, causal=True, striped=True) for owner in range(3)]
        ['causal', 'causal', 'earlier']
    """
    if not causal:
        return "all"
    if striped:
        return "causal" if owner <= place else "earlier"
    return "causal" if owner == place else "all" if owner < place else "none"
