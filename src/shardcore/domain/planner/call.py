"""One call of an operator: its rule, its operands on a mesh, and how its factors may be split."""

from collections.abc import Mapping
from typing import TypeAlias

import attrs

from shardcore.domain.chunks import chunk_sizes
from shardcore.domain.cost import Costs
from shardcore.domain.errors import LayoutError
from shardcore.domain.layout import Layout
from shardcore.domain.placements import Partial, Placement, Replicate, Shard, blocks_of
from shardcore.domain.rules.rule import Operand, OperatorRule, Result, Term

Shapes: TypeAlias = tuple[tuple[int, ...], ...]


@attrs.frozen(cache_hash=True)
class Placed:
    """A tensor on a mesh.

    Args:
        shape: Its global shape.
        layout: Its layout.
        itemsize: The bytes of one element.
        weight: Whether it is a variable's value, or made of such values alone.
        other: A layout in which it is too.
    """

    shape: tuple[int, ...]
    layout: Layout
    itemsize: int = 4
    weight: bool = False
    other: Layout | None = None


@attrs.frozen
class Cut:
    """How a factor is split.

    Args:
        axes: The mesh axes that split it, the major first.
        grain: The steps that are never split from each other.
        count: The stretches of steps, each of which is split alike.
    """

    axes: tuple[str, ...] = ()
    grain: int = 1
    count: int = 1


@attrs.frozen
class Call:
    """One call of an operator.

    Args:
        rule: Its rule.
        operands: Its operands.
        result_shapes: The global shapes of its results, where they are known.
        scales: Whether it multiplies element by element.
        costs: What a collective along each mesh axis costs.
        extents: The number of steps of each factor, which all operands have to agree on.

    Raises:
        LayoutError: If the operands do not have the dims of the rule, or dims of one factor differ.
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
        for term, operand in self.terms:
            if len(term.dims) != len(operand.shape):
                raise LayoutError(
                    f"In rule '{self.rule}', {term.name} has {len(term.dims)} dims, got shape "
                    f"{operand.shape}."
                )
            for dim, size in zip(term.dims, operand.shape, strict=True):
                if dim.factor is None:
                    continue
                steps, rest = divmod(size, dim.step)
                if rest or extents.setdefault(dim.factor, steps) != steps:
                    raise LayoutError(
                        f"In rule '{self.rule}', {term.name} has shape {operand.shape}: factor "
                        f"{dim.factor!r} would have to be of {extents.get(dim.factor)} steps."
                    )
        return extents

    @property
    def terms(self) -> tuple[tuple[Operand, Placed], ...]:
        """Each operand of the rule with the tensor that is given for it."""
        return tuple(zip(self.rule.operands, self.operands, strict=True))

    def sizes(self, axes: tuple[str, ...]) -> tuple[int, ...]:
        """The number of ranks along each of `axes`."""
        mesh = self.operands[0].layout.mesh
        return tuple(mesh.axis_size(axis) for axis in axes)

    def leaves_none_empty(self, factor: str, cut: Cut) -> bool:
        """Whether every rank has a step of `factor` where it is split by `cut`."""
        steps = self.extents[factor] // cut.count
        return min(chunk_sizes(steps, self.sizes(cut.axes), cut.grain)) > 0

    def placement(self, term: Term, factor: str) -> Placement:
        """The placement of an operand or a result along an axis that splits `factor`."""
        if factor in term.factors:
            return Shard(term.dim_of(factor))
        if isinstance(term, Result):
            return Partial(term.op) if factor in self.rule.sums(term) else Replicate()
        added = getattr(term, "added", False)
        summed = any(factor in self.rule.sums(result) for result in self.rule.results)
        return Partial("sum") if added and summed else Replicate()

    def layout(self, term: Term, cuts: Mapping[str, Cut]) -> Layout:
        """The layout that an operand or a result has where factors are split by `cuts`."""
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
        layout = Layout(
            self.operands[0].layout.mesh,
            tuple(cut.axes for cut in of_dims),
            partial,
            tuple(blocks),
        )
        # A dim that no factor splits has blocks of 1, whatever its size is.
        sizes = (dim.step * self.extents.get(dim.factor or "", 1) for dim in term.dims)
        return layout.normalized(sizes)
