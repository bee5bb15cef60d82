"""One call of an operator: its rule, its operands on a mesh, and how factors may be sharded."""

from collections.abc import Iterator, Mapping
from functools import cached_property
from itertools import chain
from math import prod
from typing import TypeAlias

import attrs

from shardcore.domain.cost.collective_cost import Costs
from shardcore.domain.engine.cuts import Cut, between_segments, cut_of, sharding_of
from shardcore.domain.engine.rules.rule import Operand, OperatorRule, Result, Shape, Term
from shardcore.domain.errors import LayoutError
from shardcore.domain.layouts.chunks import chunk_sizes
from shardcore.domain.layouts.layout import Layout
from shardcore.domain.layouts.mesh import Mesh
from shardcore.domain.layouts.placements import Partial, Placement, Replicate, Shard

Shapes: TypeAlias = tuple[tuple[int, ...], ...]


@attrs.frozen(cache_hash=True)
class PlacedTensor:
    """A tensor on a mesh, as the planner sees it."""

    shape: tuple[int, ...]
    layout: Layout
    itemsize: int = 4  # the bytes of one element
    weight: bool = False  # whether it is a variable's value, or computed from such values alone
    other: Layout | None = None  # a second layout in which it is available
    repeats: tuple[int, ...] = ()  # the dims along which its values are equal

    def is_sharded_over(self, axis: str) -> bool:
        """Tells whether `axis` shards a dim of it."""
        return isinstance(self.layout.placement(axis), Shard)


@attrs.frozen(slots=False)
class Call:
    """One call of an operator, with the arguments of `choice.choose`.

    `extents` has the number of steps of each factor, equal in all operands.
    """

    rule: OperatorRule
    operands: tuple[PlacedTensor, ...]
    result_shapes: Shapes
    scales: bool
    costs: Costs
    extents: dict[str, int] = attrs.field(init=False)

    @extents.default
    def _extents(self) -> dict[str, int]:
        extents: dict[str, int] = {}
        for number, (term, operand) in enumerate(self.terms):
            if len(term.dims) != len(operand.shape):
                raise LayoutError(
                    f"In rule '{self.rule}', operand {number} has {len(term.dims)} dims, got shape "
                    f"{operand.shape}."
                )
            for dim, size in zip(term.dims, operand.shape, strict=True):
                if dim.factor is None or dim.outer:
                    continue
                steps, rest = divmod(size, dim.step)
                if rest or extents.setdefault(dim.factor, steps) != steps:
                    raise LayoutError(
                        f"In rule '{self.rule}', operand {number} has shape {operand.shape}: "
                        f"factor {dim.factor!r} would need {extents.get(dim.factor)} steps.",
                        name=dim.factor,
                    )
        if any(term.has_pairs for term in self.rule.operands):
            self._add_extents_of_pairs(extents)
        return extents

    def _add_extents_of_pairs(self, extents: dict[str, int]) -> None:
        """Adds the steps of factors that an operand has together in a dim, by the results."""
        results = zip(self.rule.results, self.result_shapes, strict=False)
        sizes = [
            pair
            for term, shape in (*((t, placed.shape) for t, placed in self.terms), *results)
            for pair in zip(term.dims, shape, strict=True)
        ]
        left = list(sizes)
        while left:
            known = [(dim, n) for dim, n in left if len({*dim.factors} - extents.keys()) < 2]
            for dim, size in known:
                for factor in {*dim.factors} - extents.keys():
                    extents[factor] = size // max(dim.size({**extents, factor: 1}), 1)
            left = [pair for pair in left if pair not in known]
            if not known:
                break
        if left or any(dim.factor and dim.size(extents) != size for dim, size in sizes):
            shapes = [operand.shape for operand in self.operands]
            raise LayoutError(
                f"Rule '{self.rule}' has no steps for operands of shapes {shapes} and results of "
                f"shapes {self.result_shapes}: expected dims of one factor to have one size."
            )

    @cached_property
    def separate(self) -> frozenset[str]:
        """The factors that all tensors of a product with a weight have, as experts (ADR 44)."""
        weights = {operand.weight for operand in self.operands}
        if len(weights) == 1 or not any(map(self.rule.sums, self.rule.results)):
            return frozenset()
        terms = (*self.rule.operands, *self.rule.results)
        return frozenset.intersection(*(term.factors for term in terms))

    @property
    def terms(self) -> tuple[tuple[Operand, PlacedTensor], ...]:
        """Each operand of the rule with its tensor."""
        return tuple(zip(self.rule.operands, self.operands, strict=True))

    @property
    def mesh(self) -> Mesh:
        """The mesh of the operands."""
        return self.operands[0].layout.mesh

    def placement(self, term: Term, factor: str) -> Placement:
        """Finds the placement of an operand or a result along an axis that shards `factor`."""
        if factor in term.factors:
            return Shard(term.dim_of(factor))
        if isinstance(term, Result):
            return Partial(term.op) if factor in self.rule.sums(term) else Replicate()
        added = getattr(term, "added", False)
        summed = any(factor in self.rule.sums(result) for result in self.rule.results)
        return Partial("sum") if added and summed else Replicate()

    def layout(self, term: Term, cuts: Mapping[str, Cut]) -> Layout:
        """Builds the layout of an operand or a result if `cuts` shard the factors."""
        of_dims = [sharding_of(dim, cuts, self.extents) for dim in term.dims]
        partial = {
            axis: placement.op
            for factor, cut in cuts.items()
            for axis in cut.axes
            if isinstance(placement := self.placement(term, factor), Partial)
        }
        spec = tuple(axes for axes, _ in of_dims)
        blocks = tuple(dim_blocks for _, dim_blocks in of_dims)
        layout = Layout(self.mesh, spec, partial, blocks)
        # A dim that no factor shards has blocks of 1, whatever its size is.
        return layout.normalized(dim.size(self.extents) for dim in term.dims)

    def cuts_of(self, number: int) -> dict[str, Cut]:
        """Reads the cuts of factors off the layout of operand `number`."""
        term, operand = self.terms[number]
        cuts: dict[str, Cut] = {}
        for axis in chain(*map(operand.layout.dim_axes, range(operand.layout.ndim))):
            if factor_and_cut := self._factor_of(term, operand.shape, operand.layout, axis):
                factor, cut = factor_and_cut
                axes = (*cuts.get(factor, cut).axes, axis)
                cuts[factor] = attrs.evolve(cut, axes=axes)
        return cuts

    def candidates(self, axis: str, cuts: Mapping[str, Cut]) -> Iterator[tuple[str, Cut]]:
        """Yields the factors that `axis` may shard, each with its cut.

        These are the factors by which `axis` already shards an operand; of several operands, also
        those by which it shards a copy. The copy of a single operand is left out, so that a view
        has the layout of its tensor; copies beside full operands, so that the result is full.
        """
        fits_others = len(self.terms) > 1 and any(
            operand.is_sharded_over(axis) for operand in self.operands
        )
        choices = [
            (operand.weight, *factor_and_cut)
            for term, operand in self.terms
            for layout in (operand.layout, operand.other if fits_others else None)
            if layout is not None
            if (factor_and_cut := self._factor_of(term, operand.shape, layout, axis))
            and not (
                operand.weight
                and self._scales_equal_sized_weight(axis, term, operand, factor_and_cut[0])
            )
        ]
        of_weights = {
            factor for term, operand in self.terms if operand.weight for factor in term.factors
        }
        stay = any(not weight and factor not in of_weights for weight, factor, _ in choices)
        for weight, factor, cut in choices:
            if not (stay and weight) or factor in self.separate:
                for merged_cut in self._merged_cuts(axis, factor, cuts.get(factor), cut):
                    yield from self._with_axis(axis, factor, merged_cut)

    def other_dims(self, axis: str, cuts: Mapping[str, Cut]) -> Iterator[tuple[str, Cut]]:
        """Yields the factors of the other dims, the last first, of the activations `axis` shards.

        Without an activation, it yields those of the weights.
        """
        only_weights = all(operand.weight for operand in self.operands)
        for term, operand in self.terms:
            if operand.is_sharded_over(axis) and operand.weight == only_weights:
                for dim in reversed(term.dims[1:]):
                    if dim.factor is not None:
                        yield from self._with_axis(axis, dim.factor, cuts.get(dim.factor, Cut()))

    def _with_axis(self, axis: str, factor: str, cut: Cut) -> Iterator[tuple[str, Cut]]:
        """Yields `factor` with `cut` extended by `axis`, if each rank has a step then.

        The axes keep the order in which they shard an operand already; else `axis` is last. Those
        that shard segments are first.
        """
        axes = (*cut.axes, axis)
        orders = [
            tuple(other for other in operand.layout.dim_axes(term.dim_of(factor)) if other in axes)
            for term, operand in self.terms
            if factor in term.factors
        ]
        if cut.outer:  # no operand may be sharded by all of them
            longest = sorted(orders, key=len, reverse=True)
            orders += [cut.outer_first(*order, *axes) for order in longest]
        for order in (*orders, axes):
            extended, ranks = attrs.evolve(cut, axes=order), tuple(map(self.mesh.axis_size, order))
            outer = extended.number_of_outer
            if sorted(order) != sorted(axes) or not set(order[:outer]) <= set(cut.outer):
                continue
            segments = chunk_sizes(cut.count, ranks[:outer], cut.outer_block)
            steps = chunk_sizes(self.extents[factor] // cut.count, ranks[outer:], cut.block)
            if min(segments) > 0 and min(steps) > 0:
                yield factor, extended
                return

    def _merged_cuts(
        self, axis: str, factor: str, cut_so_far: Cut | None, cut: Cut
    ) -> Iterator[Cut]:
        """Yields the cuts of a factor that `axis` may extend: merges of both, then `cut_so_far`.

        Of two operands, one may be sharded between segments, and the other within them.
        """
        if cut_so_far is None:
            yield cut
            return
        own = attrs.evolve(cut, axes=(axis,))
        for plain, other in ((cut_so_far, cut), (own, cut_so_far)):
            ranks = tuple(map(self.mesh.axis_size, plain.axes))
            merged = between_segments(plain, ranks, self.extents[factor], other)
            if merged is not None and self._fits(factor, merged):
                yield attrs.evolve(merged, axes=cut_so_far.axes)
        yield cut_so_far

    def _fits(self, factor: str, cut: Cut) -> bool:
        """Tells whether all dims of `factor` can be sharded as `cut` says."""
        terms = (*self.rule.operands, *self.rule.results)
        dims = [dim for term in terms for dim in term.dims if factor in dim.factors]
        if cut.outer:
            return all(dim.outer is None and dim.count == 1 for dim in dims)
        return cut.count == 1 or all(dim.outer != factor for dim in dims)

    def _scales_equal_sized_weight(
        self, axis: str, term: Term, weight: PlacedTensor, factor: str
    ) -> bool:
        """Tells whether an activation scales a weight of its size and is not sharded by `axis`.

        A sharded result would be all-gathered later, for the same cost as the weight now.
        """
        return self.scales and any(
            not operand.weight
            and factor in other.factors
            and not operand.is_sharded_over(axis)
            and prod(operand.shape) <= prod(weight.shape)
            for other, operand in self.terms
            if other is not term
        )

    def _factor_of(
        self, term: Term, shape: Shape, layout: Layout, axis: str
    ) -> tuple[str, Cut] | None:
        """Finds the factor by which `axis` shards an operand in a layout, with its cut."""
        placement = layout.placement(axis)
        if not isinstance(placement, Shard) or not shape[placement.dim]:
            return None
        dim = term.dims[placement.dim]
        if dim.factor is None:
            return None
        axes, ranks = layout.dim_axes(placement.dim), layout.ranks(placement.dim)
        factor, cut = cut_of(dim, axis, axes, ranks, placement.block, self.extents)
        return factor, cut if self._fits(factor, cut) else Cut()
