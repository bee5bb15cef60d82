"""One call of an operator: its rule, its operands on a mesh, and the possible splits of factors."""

from collections.abc import Iterator, Mapping
from functools import cached_property
from math import prod
from typing import TypeAlias

import attrs

from shardcore.domain.chunks import block_of, chunk_sizes
from shardcore.domain.errors import LayoutError
from shardcore.domain.layout import Layout
from shardcore.domain.machines.collective_cost import Costs
from shardcore.domain.mesh import Mesh
from shardcore.domain.placements import (
    Partial,
    Placement,
    Replicate,
    Shard,
    blocks_of,
    segments_of,
)
from shardcore.domain.rules.rule import Operand, OperatorRule, Result, Shape, Term

Shapes: TypeAlias = tuple[tuple[int, ...], ...]


@attrs.frozen(cache_hash=True)
class Placed:
    """A tensor on a mesh."""

    shape: tuple[int, ...]
    layout: Layout
    itemsize: int = 4  # the bytes of one element
    weight: bool = False  # whether it is a variable's value, or computed from such values alone
    other: Layout | None = None  # a second layout in which it is available
    repeats: tuple[int, ...] = ()  # the dims along which its values are equal

    def is_split(self, axis: str) -> bool:
        """Returns whether `axis` splits it."""
        return isinstance(self.layout.placement(axis), Shard)


@attrs.frozen
class Cut:
    """The split of a factor."""

    axes: tuple[str, ...] = ()  # the mesh axes that split it, the major first
    grain: int = 1  # the number of consecutive steps that stay together
    count: int = 1  # the number of segments of steps, each of which is split alike


@attrs.frozen(slots=False)
class Call:
    """One call of an operator, with the arguments of `choice.choose`.

    `extents` has the number of steps of each factor, equal in all operands.
    """

    rule: OperatorRule
    operands: tuple[Placed, ...]
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
                if dim.factor is None:
                    continue
                steps, rest = divmod(size, dim.step)
                if rest or extents.setdefault(dim.factor, steps) != steps:
                    raise LayoutError(
                        f"In rule '{self.rule}', operand {number} has shape {operand.shape}: "
                        f"factor {dim.factor!r} would need {extents.get(dim.factor)} steps."
                    )
        return extents

    @cached_property
    def separate(self) -> frozenset[str]:
        """The factors that every tensor of a product with a weight has, as those of experts."""
        weights = {operand.weight for operand in self.operands}
        if len(weights) == 1 or not any(map(self.rule.sums, self.rule.results)):
            return frozenset()
        terms = (*self.rule.operands, *self.rule.results)
        return frozenset.intersection(*(each.factors for each in terms))

    @property
    def terms(self) -> tuple[tuple[Operand, Placed], ...]:
        """Each operand of the rule with its tensor."""
        return tuple(zip(self.rule.operands, self.operands, strict=True))

    @property
    def mesh(self) -> Mesh:
        """The mesh of the operands."""
        return self.operands[0].layout.mesh

    def placement(self, term: Term, factor: str) -> Placement:
        """Returns the placement of an operand or a result along an axis that splits `factor`."""
        if factor in term.factors:
            return Shard(term.dim_of(factor))
        if isinstance(term, Result):
            return Partial(term.op) if factor in self.rule.sums(term) else Replicate()
        added = getattr(term, "added", False)
        summed = any(factor in self.rule.sums(result) for result in self.rule.results)
        return Partial("sum") if added and summed else Replicate()

    def layout(self, term: Term, cuts: Mapping[str, Cut]) -> Layout:
        """Returns the layout of an operand or a result if `cuts` split the factors."""
        of_dims = [cuts.get(dim.factor or "", Cut()) for dim in term.dims]
        blocks = (
            blocks_of(dim.count * cut.count, dim.block * cut.grain) if cut.axes else 1
            for dim, cut in zip(term.dims, of_dims, strict=True)
        )
        partial = {
            axis: placement.op
            for factor, cut in cuts.items()
            for axis in cut.axes
            if isinstance(placement := self.placement(term, factor), Partial)
        }
        layout = Layout(self.mesh, tuple(cut.axes for cut in of_dims), partial, tuple(blocks))
        # A dim that no factor splits has blocks of 1, whatever its size is.
        sizes = (dim.step * self.extents.get(dim.factor or "", 1) for dim in term.dims)
        return layout.normalized(sizes)

    def cuts_of(self, place: int) -> dict[str, Cut]:
        """Returns the cuts of the factors that operand `place` is split by."""
        term, operand = self.terms[place]
        cuts: dict[str, Cut] = {}
        for axis in self.mesh.axis_names:
            if found := self._factor_of(term, operand.shape, operand.layout, axis):
                factor, cut = found
                axes = operand.layout.dim_axes(term.dim_of(factor))
                cuts[factor] = attrs.evolve(cut, axes=axes)
        return cuts

    def candidates(self, axis: str, cuts: Mapping[str, Cut]) -> Iterator[tuple[str, Cut]]:
        """Yields the factors that `axis` may split, each with its cut.

        These are the factors by which `axis` already splits an operand; of several operands, also
        those by which it splits a copy. The copy of a single operand is left out, so that a view
        has the layout of its tensor; copies beside full operands, so that the result is full.
        """
        fits_others = len(self.terms) > 1 and any(each.is_split(axis) for each in self.operands)
        found = [
            (operand.weight, *each)
            for term, operand in self.terms
            for layout in (operand.layout, operand.other if fits_others else None)
            if layout is not None
            if (each := self._factor_of(term, operand.shape, layout, axis))
            and not (operand.weight and self._meets_its_like(axis, term, operand, each[0]))
        ]
        of_weights = {
            factor for term, operand in self.terms if operand.weight for factor in term.factors
        }
        stay = any(not weight and factor not in of_weights for weight, factor, _ in found)
        for weight, factor, cut in found:
            if not (stay and weight) or factor in self.separate:
                yield from self._with_axis(axis, factor, cuts.get(factor, cut))

    def other_dims(self, axis: str, cuts: Mapping[str, Cut]) -> Iterator[tuple[str, Cut]]:
        """Yields the factors of the other dims, the last first, of the activations `axis` splits.

        Without an activation, it yields those of the weights.
        """
        only_weights = all(operand.weight for operand in self.operands)
        for term, operand in self.terms:
            if operand.is_split(axis) and operand.weight == only_weights:
                for dim in reversed(term.dims[1:]):
                    if dim.factor is not None:
                        yield from self._with_axis(axis, dim.factor, cuts.get(dim.factor, Cut()))

    def _with_axis(self, axis: str, factor: str, cut: Cut) -> Iterator[tuple[str, Cut]]:
        """Yields `factor` with `cut` extended by `axis`, if each rank has a step then.

        The axes keep the order in which they split an operand already; else `axis` is last.
        """
        axes = (*cut.axes, axis)
        orders = [
            tuple(each for each in operand.layout.dim_axes(term.dim_of(factor)) if each in axes)
            for term, operand in self.terms
            if factor in term.factors
        ]
        for order in (*orders, axes):
            ranks = tuple(map(self.mesh.axis_size, order))
            steps = chunk_sizes(self.extents[factor] // cut.count, ranks, cut.grain)
            if sorted(order) == sorted(axes) and min(steps) > 0:
                yield factor, Cut(order, cut.grain, cut.count)
                return

    def _meets_its_like(self, axis: str, term: Term, weight: Placed, factor: str) -> bool:
        """Returns whether an activation scales a weight of its size, and `axis` does not split it.

        A split result would be gathered later, for the same cost as the weight now.
        """
        return self.scales and any(
            not operand.weight
            and factor in other.factors
            and not operand.is_split(axis)
            and prod(operand.shape) <= prod(weight.shape)
            for other, operand in self.terms
            if other is not term
        )

    def _factor_of(
        self, term: Term, shape: Shape, layout: Layout, axis: str
    ) -> tuple[str, Cut] | None:
        """Returns the factor by which `axis` splits an operand in a layout, with its cut."""
        placement = layout.placement(axis)
        if not isinstance(placement, Shard) or not shape[placement.dim]:
            return None
        dim = term.dims[placement.dim]
        if dim.factor is None:
            return None
        steps, (count, block) = self.extents[dim.factor], segments_of(placement.block)
        left, rest = divmod(count, dim.count)
        if rest or steps % left:
            return dim.factor, Cut()
        inner, ranks = steps // left, layout.ranks(placement.dim)
        wanted = chunk_sizes(inner * dim.block, ranks, block)
        if any(size % dim.block for size in wanted):
            return dim.factor, Cut(count=left)
        grain = block_of(inner, ranks, tuple(size // dim.block for size in wanted))
        return dim.factor, Cut(grain=grain or 1, count=left)
