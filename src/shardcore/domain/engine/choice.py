"""Choice of the cheapest sharding of an operator, by its rule and the layouts of its operands.

The axes are decided one after the other. An axis shards one factor of the rule, or none. The
candidates are the factors that it already shards in an operand. The cost is the time of the
collectives: they redistribute the operands, the results, and the gradients of weights. If it costs
less, the activations are all-gathered and every rank does all of the work.

A weight follows the activations. If an axis shards an activation by a factor that no weight has,
the weight is all-gathered and the activation stays. If an axis shards an activation by no factor of
the rule, it shards another dim instead, or the activation is all-gathered, if that costs less. The
other dim is never the first: weights would have to follow the batch. If all operands are weights,
the same holds for them. Every rank has an element.
"""

from collections.abc import Iterable, Mapping
from functools import lru_cache
from math import inf, prod

import attrs

from shardcore.domain.cost.collective_cost import Costs
from shardcore.domain.engine.call import Call, PlacedTensor, Shapes
from shardcore.domain.engine.cuts import Cut, sharding_of
from shardcore.domain.engine.redistribution import transition
from shardcore.domain.engine.rules.rule import OperatorRule, Result, Shape, Term, letters
from shardcore.domain.layouts.chunks import blocks_along
from shardcore.domain.layouts.layout import Layout
from shardcore.domain.layouts.placements import Partial, Placement, Replicate, Shard


@attrs.frozen
class ShardingCosts:
    """The costs of the shardings of a call, each along one mesh axis."""

    call: Call

    def of_candidate(self, axis: str, factor: str, cut: Cut) -> float:
        """Sums the seconds of redistributing operands and results along `axis` for `cut`."""
        total = 0.0
        for term, operand in self.call.terms:
            source = operand.layout.placement(axis)
            target = self._target_placement(term, operand.shape, operand.layout, axis, factor, cut)
            total += self._operand_cost(
                operand, target, axis, self._expert_share(term, operand, factor)
            )
            if operand.weight and isinstance(target, Shard):
                total += self._gradient_cost(target, source, axis, _group_bytes(operand, axis))
        for result, shape in zip(self.call.rule.results, self.call.result_shapes, strict=False):
            source = wanted_placement = self.call.placement(result, factor)
            if result.like is not None:
                reference = self.call.operands[result.like].layout
                wanted_placement = reference.placement(axis)
                source = self._target_placement(result, shape, reference, axis, factor, cut)
            target = Replicate() if isinstance(wanted_placement, Partial) else wanted_placement
            total += self._transition_cost(
                source, target, axis, prod(shape) * self.call.operands[0].itemsize
            )
        return total

    def of_all_work(self, axis: str) -> float:
        """Sums the seconds of all-gathering the operands that `axis` shards, and of the extra work.

        Each rank then does the work of all ranks along `axis`.
        """
        gathers = sum(
            self._operand_cost(operand, Replicate(), axis) for operand in self.call.operands
        )
        ranks = self.call.mesh.axis_size(axis)
        # An upper bound of the multiplications: one per step of all factors and other dims.
        never_sharded = (
            size
            for term, operand in self.call.terms
            for dim, size in zip(term.dims, operand.shape, strict=True)
            if dim.factor is None
        )
        work = prod(self.call.extents.values()) * prod(never_sharded)
        return work * (ranks - 1) / ranks / self.call.costs.multiplications + gathers

    def of_chosen_work(self, axis: str) -> float:
        """Computes `of_all_work` if it may be chosen although `axis` can shard a factor; else inf.

        It may for one sharded activation beside a replicated weight. If `axis` shards the weight,
        its work is meant to be sharded, as is a gradient's sum over rows. An operator with several
        results is left out: some may be unused, so that their costs are unknown.
        """
        sharded = [operand for operand in self.call.operands if operand.is_sharded_over(axis)]
        with_weight = any(operand.weight for operand in self.call.operands)
        if (
            len(sharded) != 1
            or sharded[0].weight
            or not with_weight
            or len(self.call.rule.results) > 1
        ):
            return inf
        return self.of_all_work(axis)

    def _target_placement(
        self, term: Term, shape: Shape, layout: Layout, axis: str, factor: str, cut: Cut
    ) -> Placement:
        """Finds the placement that `cut` needs; that of `layout` if it gives the same shards."""
        source, target = layout.placement(axis), self.call.placement(term, factor)
        if len(shape) < len(term.dims):  # a gradient that is not asked for has no elements
            return target
        if isinstance(target, Shard) and isinstance(source, Shard) and source.dim == target.dim:
            size, own = shape[target.dim], layout.dim_axes(target.dim)
            axes, wanted = sharding_of(term.dims[target.dim], {factor: cut}, self.call.extents)
            source_blocks = blocks_along(size, source.block, own.index(axis))
            target_blocks = blocks_along(size, wanted, axes.index(axis))
            if source_blocks == target_blocks:
                return source
            one, other = (
                Layout(self.call.mesh, (axis,), blocks=(blocks,)).normalized((size,))
                for blocks in (source_blocks, target_blocks)
            )
            return source if one == other else Shard(target.dim, wanted)
        return target

    def _expert_share(self, term: Term, operand: PlacedTensor, factor: str) -> float:
        """Computes the share of an activation's bytes that count if `factor` is separate.

        Products of experts follow one another, and a step of the first and one of the last move.
        Each counts the smaller of its two sides, as does its backward pass: so both choose alike
        (ADR 44).
        """
        if operand.weight or factor not in self.call.separate:
            return 1.0
        if term.dim_of(factor) in operand.repeats:  # it is all-gathered, and the result stays
            return 1.0
        size = max(prod(operand.shape), 1)
        return min([size, *map(prod, self.call.result_shapes)]) / size

    def _operand_cost(
        self, operand: PlacedTensor, target: Placement, axis: str, share: float = 1.0
    ) -> float:
        """Costs an operand along `axis` from its cheapest layout."""
        layouts = [operand.layout, operand.other] if operand.other else [operand.layout]
        held = _group_bytes(operand, axis) * share
        sources = [layout.placement(axis) for layout in layouts]
        if isinstance(target, Shard) and target.dim in operand.repeats and target not in sources:
            # Its values are all-gathered once, and each rank repeats them for its shard.
            held, target = held / operand.shape[target.dim], Replicate()
        return min(self._transition_cost(source, target, axis, held) for source in sources)

    def _gradient_cost(self, source: Placement, target: Placement, axis: str, held: float) -> float:
        """Costs the gradient of a weight without the latency.

        With the latency, small activations would be all-gathered in the forward pass instead. That
        sends more: the rows of a batch are larger than the results of a last layer.
        """
        return self._transition_cost(source, target, axis, held) - self._transition_cost(
            source, target, axis, 0
        )

    def _transition_cost(
        self, source: Placement, target: Placement, axis: str, held: float
    ) -> float:
        if source != target and isinstance(target, Partial):  # computed from the full tensor
            target = Replicate()
        ranks = self.call.mesh.axis_size(axis)
        return self.call.costs.collective(transition(source, target), axis, ranks, held)


def _group_bytes(operand: PlacedTensor, axis: str) -> float:
    """Counts the bytes that the ranks of one group along `axis` hold together."""
    mesh = operand.layout.mesh
    others = prod(
        mesh.axis_size(other)
        for other in mesh.axis_names
        if other != axis and operand.is_sharded_over(other)
    )
    return prod(operand.shape) * operand.itemsize / others


@attrs.frozen
class Sharding:
    """The sharding of an operator over a mesh."""

    operands: tuple[Layout, ...]  # per operand the layout into which it is redistributed
    results: tuple[Layout, ...]  # per result its layout
    extents: Mapping[str, int]  # the number of steps of each factor
    # Whether an axis that shards an operand can shard no factor: each of its ranks does all of the
    # work.
    gathers: bool
    replicates: bool = False  # whether each rank does all of the work because that costs less

    @classmethod
    def of(cls, operands: Iterable[Layout], results: Iterable[Layout], shape: Shape) -> "Sharding":
        """Builds the sharding of an operator whose tensors, all of `shape`, have these layouts."""
        extents = dict(zip(letters(len(shape)), shape, strict=True))
        return cls(tuple(operands), tuple(results), extents, gathers=False)

    def global_shape(self, result: Result, local: tuple[int, ...]) -> tuple[int, ...]:
        """Computes the global shape of `result`, whose local shard has shape `local`."""
        return tuple(
            size if dim.factor is None else dim.size(self.extents)
            for dim, size in zip(result.dims, local, strict=True)
        )


@lru_cache(maxsize=4096)
def choose(
    rule: OperatorRule,
    operands: tuple[PlacedTensor, ...],
    result_shapes: Shapes = (),
    scales: bool = False,
    costs: Costs = Costs(),  # noqa: B008 - it is frozen
) -> Sharding:
    """Chooses the cheapest sharding of an operator.

    `result_shapes` has the global shapes of the results. They are needed if the cost of reducing a
    result or of redistributing a gradient depends on the factor. If `scales`, it multiplies element
    by element: a weight is all-gathered if an activation of its size is replicated, and the result
    is not sharded.

    Raises:
        LayoutError: If the operands do not have the dims of the rule, or dims of one factor differ.

    Example:
        >>> from shardcore.domain.layouts.mesh import Mesh
        >>> from shardcore.domain.engine.rules.rule import rule
        >>> mesh = Mesh((2,), ("model",))
        >>> x = PlacedTensor((8, 4), Layout(mesh, (None, None)))
        >>> w = PlacedTensor((4, 6), Layout(mesh, ("model", None)), weight=True)
        >>> chosen = choose(rule("n c, c o -> n o"), (x, w))
        >>> str(chosen.operands[0]), str(chosen.results[0])
        ("(None, 'model')", "(None, None) with sum over 'model'")
    """
    call = Call(rule, operands, result_shapes, scales, costs)
    seconds, mesh = ShardingCosts(call), call.mesh
    cuts: dict[str, Cut] = {}
    unassigned, replicates = list(mesh.axis_names), False
    for candidates, of_all_work in (
        (call.candidates, seconds.of_chosen_work),
        (call.other_dims, seconds.of_all_work),
    ):
        for axis in tuple(unassigned):
            candidate_costs = {
                candidate: seconds.of_candidate(axis, *candidate)
                for candidate in candidates(axis, cuts)
            }
            if candidate_costs:
                factor, cut = min(candidate_costs, key=candidate_costs.__getitem__)
                if candidate_costs[factor, cut] <= of_all_work(axis):
                    cuts[factor] = cut
                else:
                    replicates = True
            if candidate_costs or mesh.axis_size(axis) == 1:
                unassigned.remove(axis)
    return _sharding(call, cuts, unassigned, replicates)


def shard_as(rule: OperatorRule, operands: tuple[PlacedTensor, ...], number: int) -> Sharding:
    """Shards an operator so that operand `number` stays as it is sharded.

    Some operators keep tensors for their gradient, which fit the rows that a rank computed. The
    gradient is then sharded as a result of the operator is, and not by another choice.

    Example:
        >>> from shardcore.domain.layouts.mesh import Mesh
        >>> from shardcore.domain.engine.rules.rule import rule
        >>> mesh = Mesh((2,), ("data",))
        >>> x = PlacedTensor((4, 6), Layout(mesh, (None, "data")))
        >>> y = PlacedTensor((4, 3), Layout(mesh, ("data", None)))
        >>> sharding = shard_as(rule("n a, n b -> a b"), (x, y), 1)
        >>> str(sharding.operands[0]), str(sharding.results[0])
        ("('data', None)", "(None, None) with sum over 'data'")
    """
    call = Call(rule, operands, (), False, Costs())
    cuts = call.cuts_of(number)
    used = {axis for cut in cuts.values() for axis in cut.axes}
    sizes = zip(call.mesh.axis_names, call.mesh.shape, strict=True)
    return _sharding(call, cuts, [axis for axis, size in sizes if size > 1 and axis not in used])


def _sharding(
    call: Call, cuts: Mapping[str, Cut], unassigned: Iterable[str], replicates: bool = False
) -> Sharding:
    # An unassigned axis all-gathers the activations that it shards; without any, the weights.
    moved = [operand for operand in call.operands if not operand.weight] or call.operands
    return Sharding(
        tuple(call.layout(term, cuts) for term in call.rule.operands),
        tuple(call.layout(term, cuts) for term in call.rule.results),
        call.extents,
        gathers=any(operand.is_sharded_over(axis) for axis in unassigned for operand in moved),
        replicates=replicates,
    )
