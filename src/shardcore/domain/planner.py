"""How an operator is split over a mesh, given its sharding rule and the layouts of its operands.

Each mesh axis is decided on its own: it splits one factor of the rule, or none. The candidates are
the factors that the axis already splits in an operand, and the cheapest wins: the seconds of the
collectives that bring operands there, results to where they are wanted, and the gradients of
weights back. Where it costs less, the activations are all-gathered and every rank does all of the
work. A weight follows the activations: where an axis splits an activation by a factor that no
weight has, the weight is all-gathered and the activation stays. Where an activation is split by no
factor of the rule, one of its other dims is split instead, unless it costs less to all-gather it
and to have every rank do all of the work; not its first dim, since weights would have to follow the
batch. Where all operands are weights, the same holds of them. No rank is left without an element.
"""

from collections.abc import Iterator, Mapping
from functools import lru_cache
from math import inf, prod
from typing import TypeAlias

import attrs

from shardcore.domain.cost import Costs
from shardcore.domain.errors import LayoutError
from shardcore.domain.layout import Layout, chunk_sizes, least_block
from shardcore.domain.operator_rules import Dim, OperatorRule, Result, Term
from shardcore.domain.placements import (
    Blocks,
    Partial,
    Placement,
    Replicate,
    Shard,
    blocks_of,
    stretches_of,
)
from shardcore.domain.redistribution import transition

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
class Split:
    """How an operator is split over a mesh.

    Args:
        operands: Per operand the layout that it has to be brought into.
        results: Per result the layout in which it comes.
        extents: The steps of each factor.
        gathers: Whether an axis that splits an operand cannot split anything here: each of its
            ranks does all of the work.
        replicates: Whether that was chosen, as it costs less.
    """

    operands: tuple[Layout, ...]
    results: tuple[Layout, ...]
    extents: Mapping[str, int]
    gathers: bool
    replicates: bool = False

    def global_shape(self, result: Result, local: tuple[int, ...]) -> tuple[int, ...]:
        """The global shape of `result`, of which a rank has a shard of shape `local`."""
        return tuple(
            size if dim.factor is None else self.extents[dim.factor] * dim.step
            for dim, size in zip(result.dims, local, strict=True)
        )


@lru_cache(maxsize=4096)
def choose(
    rule: OperatorRule,
    operands: tuple[Placed, ...],
    result_shapes: Shapes = (),
    scales: bool = False,
    costs: Costs = Costs(),  # noqa: B008 - it is frozen
) -> Split:
    """The cheapest split of an operator.

    Args:
        rule: The rule of the operator.
        operands: The operands, in the order of the rule, on one mesh.
        result_shapes: The global shapes of the results, where the cost of reducing a result, or of
            bringing a gradient to its operand, depends on the factor that is chosen.
        scales: Whether the operator multiplies element by element: a weight that meets an
            activation of its size that is not split is all-gathered, and the result is not split.
        costs: What a collective along each axis costs.

    Raises:
        LayoutError: If the operands do not have the dims of the rule, or dims of one factor differ.

    Example:
        >>> from shardcore.domain.mesh import Mesh
        >>> from shardcore.domain.operator_rules import Operand
        >>> rule = OperatorRule((Operand("x", "n c"), Operand("w", "c o")), (Result("y", "n o"),))
        >>> mesh = Mesh((2,), ("model",))
        >>> x = Placed((8, 4), Layout(mesh, (None, None)))
        >>> w = Placed((4, 6), Layout(mesh, ("model", None)), weight=True)
        >>> chosen = choose(rule, (x, w))
        >>> str(chosen.operands[0]), str(chosen.results[0])
        ("(None, 'model')", "(None, None) with sum over 'model'")
    """
    mesh = operands[0].layout.mesh
    call = _Call(rule, operands, result_shapes, _extents(rule, operands), scales, costs)
    cuts: dict[str, Cut] = {}
    idle, replicates = [], False
    for axis in mesh.axis_names:
        found = {each: call.cost(axis, *each) for each in call.candidates(axis, cuts)}
        if found:
            factor, cut = min(found, key=found.__getitem__)
            if found[factor, cut] <= call.cost_of_all_work(axis):
                cuts[factor] = cut
            else:
                replicates = True
        elif mesh.axis_size(axis) > 1:
            idle.append(axis)
    for axis in tuple(idle):
        found = {each: call.cost(axis, *each) for each in call.other_dims(axis, cuts)}
        if found:
            factor, cut = min(found, key=found.__getitem__)
            if found[factor, cut] <= call.cost_of_gathering(axis) + call.seconds_of_work(axis):
                cuts[factor] = cut
            else:
                replicates = True
            idle.remove(axis)
    return Split(
        tuple(call.layout(term, cuts) for term in rule.operands),
        tuple(call.layout(term, cuts) for term in rule.results),
        call.extents,
        call.gathers(idle),
        replicates,
    )


def _extents(rule: OperatorRule, operands: tuple[Placed, ...]) -> dict[str, int]:
    """The number of steps of each factor, which all operands have to agree on."""
    extents: dict[str, int] = {}
    for term, operand in zip(rule.operands, operands, strict=True):
        if len(term.dims) != len(operand.shape):
            raise LayoutError(
                f"In rule '{rule}', {term.name} has {len(term.dims)} dims, got shape "
                f"{operand.shape}."
            )
        for dim, size in zip(term.dims, operand.shape, strict=True):
            if dim.factor is None:
                continue
            steps, rest = divmod(size, dim.step)
            if rest or extents.setdefault(dim.factor, steps) != steps:
                raise LayoutError(
                    f"In rule '{rule}', {term.name} has shape {operand.shape}: factor "
                    f"{dim.factor!r} would have to be of {extents.get(dim.factor)} steps."
                )
    return extents


@attrs.frozen
class _Call:
    """One call of an operator: its rule, its operands, and the steps of each factor."""

    rule: OperatorRule
    operands: tuple[Placed, ...]
    result_shapes: Shapes
    extents: dict[str, int]
    scales: bool
    costs: Costs

    def candidates(self, axis: str, cuts: Mapping[str, Cut]) -> Iterator[tuple[str, Cut]]:
        """The factors that `axis` may split, each with the cut that it then has."""
        seen = set()
        for factor, (count, grain) in self._split_by(axis):
            after = self._cut_by(axis, factor, cuts.get(factor, Cut(grain=grain, count=count)))
            if (factor, after) not in seen and self._leaves_none_empty(factor, after):
                seen.add((factor, after))
                yield factor, after

    def other_dims(self, axis: str, cuts: Mapping[str, Cut]) -> Iterator[tuple[str, Cut]]:
        """The factors of the other dims, the last first, of the activations that `axis` splits.

        Of the weights where there is no activation.
        """
        only_weights = all(operand.weight for operand in self.operands)
        for term, operand in zip(self.rule.operands, self.operands, strict=True):
            is_split = isinstance(operand.layout.placement(axis), Shard)
            if not is_split or operand.weight != only_weights:
                continue
            for dim in reversed(term.dims[1:]):
                if dim.factor is not None:
                    after = self._cut_by(axis, dim.factor, cuts.get(dim.factor, Cut()))
                    if self._leaves_none_empty(dim.factor, after):
                        yield dim.factor, after

    def _cut_by(self, axis: str, factor: str, cut: Cut) -> Cut:
        """`cut` of `factor` with `axis` splitting it too."""
        return self.reordered(factor, Cut((*cut.axes, axis), cut.grain, cut.count))

    def _split_by(self, axis: str) -> Iterator[tuple[str, tuple[int, int]]]:
        """The factors that `axis` splits an operand by, with their stretches and grain."""
        found = [
            (operand.weight, *each)
            for term, operand in zip(self.rule.operands, self.operands, strict=True)
            if (each := self._factor_of(term, operand, axis))
            and not (operand.weight and self._meets_its_like(axis, term, operand, each[0]))
        ]
        of_weights = {
            factor
            for term, operand in zip(self.rule.operands, self.operands, strict=True)
            if operand.weight
            for factor in term.factors
        }
        stay = any(not weight and factor not in of_weights for weight, factor, _ in found)
        return ((factor, cut) for weight, factor, cut in found if not (stay and weight))

    def _meets_its_like(self, axis: str, term: Term, weight: Placed, factor: str) -> bool:
        """Whether a weight meets, element by element, an activation of its size that is not split.

        The result would have to be gathered later, which costs what gathering the weight does now.
        """
        return self.scales and any(
            not operand.weight
            and factor in other.factors
            and not isinstance(operand.layout.placement(axis), Shard)
            and prod(operand.shape) <= prod(weight.shape)
            for other, operand in zip(self.rule.operands, self.operands, strict=True)
            if other is not term
        )

    def gathers(self, axes: list[str]) -> bool:
        """Whether an axis of `axes` splits an activation, or where there is none, a weight."""
        activations = [each for each in self.operands if not each.weight]
        return any(
            isinstance(each.layout.placement(axis), Shard)
            for axis in axes
            for each in activations or self.operands
        )

    def _factor_of(
        self, term: Term, operand: Placed, axis: str
    ) -> tuple[str, tuple[int, int]] | None:
        placement = operand.layout.placement(axis)
        if not isinstance(placement, Shard) or not operand.shape[placement.dim]:
            return None
        dim = term.dims[placement.dim]
        if dim.factor is None:
            return None
        ranks = self._sizes(operand.layout.dim_axes(placement.dim))
        return dim.factor, self._cut(dim, self.extents[dim.factor], placement.block, ranks)

    def _cut(self, dim: Dim, steps: int, blocks: Blocks, ranks: tuple[int, ...]) -> tuple[int, int]:
        """The stretches and the grain by which a factor is split where a dim is.

        Args:
            dim: The dim.
            steps: The steps of its factor.
            blocks: The blocks of the dim.
            ranks: The ranks along each axis that splits the dim.
        """
        count, block = stretches_of(blocks)
        left, rest = divmod(count, dim.count)
        if rest or steps % left:
            return 1, 1
        inner = steps // left
        wanted = chunk_sizes(inner * dim.block, ranks, block)
        if any(size % dim.block for size in wanted):
            return left, 1
        in_steps = tuple(size // dim.block for size in wanted)
        fitting = (
            grain
            for grain in range(1, in_steps[0] + 1)
            if in_steps[0] % grain == 0 and chunk_sizes(inner, ranks, grain) == in_steps
        )
        return left, least_block(inner, ranks, next(fitting, 1))

    def _sizes(self, axes: tuple[str, ...]) -> tuple[int, ...]:
        mesh = self.operands[0].layout.mesh
        return tuple(mesh.axis_size(axis) for axis in axes)

    def _leaves_none_empty(self, factor: str, cut: Cut) -> bool:
        steps = self.extents[factor] // cut.count
        return min(chunk_sizes(steps, self._sizes(cut.axes), cut.grain)) > 0

    def reordered(self, factor: str, cut: Cut) -> Cut:
        """`cut` with its axes in the order of an operand that they split so already."""
        for term, operand in zip(self.rule.operands, self.operands, strict=True):
            if factor in term.factors:
                split_by = operand.layout.dim_axes(term.dim_of(factor))
                axes = tuple(axis for axis in split_by if axis in cut.axes)
                other = Cut(axes, cut.grain, cut.count)
                if sorted(axes) == sorted(cut.axes) and self._leaves_none_empty(factor, other):
                    return other
        return cut

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
            if isinstance(placement := _placement(self.rule, term, factor), Partial)
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

    def cost(self, axis: str, factor: str, cut: Cut) -> float:
        """The cost of bringing operands and results along `axis` where `cut` wants them."""
        ranks = self.operands[0].layout.mesh.axis_size(axis)
        total = 0.0
        for term, operand in zip(self.rule.operands, self.operands, strict=True):
            source = operand.layout.placement(axis)
            target = self._wanted(term, operand.shape, source, factor, cut, ranks)
            total += self._brought(operand, target, axis)
            if operand.weight and isinstance(target, Shard):
                total += self._way_back(target, source, axis, _bytes(operand, axis))
        by_name = dict(zip((term.name for term in self.rule.operands), self.operands, strict=True))
        for result, shape in zip(self.rule.results, self.result_shapes, strict=False):
            source = _placement(self.rule, result, factor)
            like = source
            if result.like:
                like = by_name[result.like].layout.placement(axis)
                source = self._wanted(result, shape, like, factor, cut, ranks)
            target = Replicate() if isinstance(like, Partial) else like
            total += self._sent(source, target, axis, prod(shape) * self.operands[0].itemsize)
        return total

    def cost_of_gathering(self, axis: str) -> float:
        """The cost of all-gathering along `axis` every operand that it splits."""
        return sum(self._brought(operand, Replicate(), axis) for operand in self.operands)

    def cost_of_all_work(self, axis: str) -> float:
        """The cost of having each rank along `axis` do all of the work, on an all-gathered operand.

        That is for one activation beside a weight, neither of which is split otherwise: the work
        with a weight that `axis` splits is meant to be split, and so is a gradient's sum over rows.
        Of several results some may not be read, so that what they cost is not known.
        """
        split = [each for each in self.operands if isinstance(each.layout.placement(axis), Shard)]
        with_weight = any(each.weight for each in self.operands)
        if len(split) != 1 or split[0].weight or not with_weight or len(self.rule.results) > 1:
            return inf
        return self.seconds_of_work(axis) + self.cost_of_gathering(axis)

    def seconds_of_work(self, axis: str) -> float:
        """The seconds of the work that a rank does in addition where `axis` splits nothing."""
        ranks = self.operands[0].layout.mesh.axis_size(axis)
        return self._multiplications() * (ranks - 1) / ranks / self.costs.multiplications

    def _multiplications(self) -> int:
        """How many there are at most: an element for each step of all factors, and in a window."""
        never_split = (
            size
            for term, operand in zip(self.rule.operands, self.operands, strict=True)
            for dim, size in zip(term.dims, operand.shape, strict=True)
            if dim.factor is None
        )
        return prod(self.extents.values()) * prod(never_split)

    def _wanted(
        self,
        term: Term,
        shape: tuple[int, ...],
        source: Placement,
        factor: str,
        cut: Cut,
        ranks: int,
    ) -> Placement:
        """The placement of an operand; `source` itself where that is split no other way."""
        target = _placement(self.rule, term, factor)
        if isinstance(target, Shard) and isinstance(source, Shard) and source.dim == target.dim:
            dim, size = term.dims[target.dim], shape[target.dim]
            wanted = blocks_of(dim.count * cut.count, dim.block * cut.grain)
            same = _splits_alike(size, ranks, wanted, source.block)
            return source if same else Shard(target.dim, wanted)
        return target

    def _brought(self, operand: Placed, target: Placement, axis: str) -> float:
        """What it costs to bring an operand along `axis` to `target`, from where it costs least."""
        layouts = [operand.layout, operand.other] if operand.other else [operand.layout]
        held = _bytes(operand, axis)
        return min(self._sent(each.placement(axis), target, axis, held) for each in layouts)

    def _way_back(self, source: Placement, target: Placement, axis: str, held: float) -> float:
        """The cost of bringing the gradient of a weight to where that is: its bytes alone.

        Its start is not counted, as what is small would else be gathered in the forward pass, which
        sends more: the rows of a batch are more than the results of a last layer.
        """
        return self._sent(source, target, axis, held) - self._sent(source, target, axis, 0)

    def _sent(self, source: Placement, target: Placement, axis: str, held: float) -> float:
        """What it costs to bring `held` bytes along `axis` from one placement to another."""
        if source != target and isinstance(target, Partial):  # made of the full tensor
            target = Replicate()
        ranks = self.operands[0].layout.mesh.axis_size(axis)
        return self.costs.collective(transition(source, target), axis, ranks, held)


def _splits_alike(size: int, ranks: int, one: Blocks, other: Blocks) -> bool:
    """Whether both split a dim of `size` elements into the same shards."""
    (count, block), (other_count, other_block) = stretches_of(one), stretches_of(other)
    return count == other_count and (
        chunk_sizes(size // count, (ranks,), block)
        == chunk_sizes(size // count, (ranks,), other_block)
    )


def _placement(rule: OperatorRule, term: Term, factor: str) -> Placement:
    """What an axis that splits `factor` does to an operand or a result."""
    if factor in term.factors:
        return Shard(term.dim_of(factor))
    if isinstance(term, Result):
        return Partial(term.op) if factor in rule.sums(term) else Replicate()
    added = getattr(term, "added", False)
    summed = any(factor in rule.sums(result) for result in rule.results)
    return Partial("sum") if added and summed else Replicate()


def _bytes(operand: Placed, axis: str) -> float:
    """The bytes that the ranks of one group along `axis` hold together."""
    mesh = operand.layout.mesh
    others = prod(
        mesh.axis_size(other)
        for other in mesh.axis_names
        if other != axis and isinstance(operand.layout.placement(other), Shard)
    )
    return prod(operand.shape) * operand.itemsize / others
