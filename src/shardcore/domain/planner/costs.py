"""Costs, in seconds, of sharding a factor of an operator's rule by a mesh axis."""

from math import inf, prod

import attrs

from shardcore.domain.chunks import blocks_along
from shardcore.domain.layout import Layout
from shardcore.domain.placements import Partial, Placement, Replicate, Shard
from shardcore.domain.planner.call import Call, PlacedTensor
from shardcore.domain.planner.cuts import Cut, sharding_of
from shardcore.domain.redistribution.plan import transition
from shardcore.domain.rules.rule import Shape, Term


@attrs.frozen
class ShardingCosts:
    """The costs of the shardings of a call, each along one mesh axis."""

    call: Call

    def of_candidate(self, axis: str, factor: str, cut: Cut) -> float:
        """Returns the cost of redistributing operands and results along `axis` for `cut`."""
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
        """Returns the cost of all-gathering the operands that `axis` shards, and of the extra work.

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
        """Returns `of_all_work` if it may be chosen although `axis` can shard a factor; else inf.

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
        """Returns the placement that `cut` needs; that of `layout` if it gives the same shards."""
        source, target = layout.placement(axis), self.call.placement(term, factor)
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
        """Returns the share of an activation's bytes that count if `factor` is separate.

        Products of experts follow one another, and a step of the first and one of the last move.
        Each counts the smaller of its two sides, as does its backward pass: so both choose alike.
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
        """Returns the cost of redistributing an operand along `axis`, from its cheapest layout."""
        layouts = [operand.layout, operand.other] if operand.other else [operand.layout]
        held = _group_bytes(operand, axis) * share
        sources = [layout.placement(axis) for layout in layouts]
        if isinstance(target, Shard) and target.dim in operand.repeats and target not in sources:
            # Its values are all-gathered once, and each rank repeats them for its shard.
            held, target = held / operand.shape[target.dim], Replicate()
        return min(self._transition_cost(source, target, axis, held) for source in sources)

    def _gradient_cost(self, source: Placement, target: Placement, axis: str, held: float) -> float:
        """Returns the cost of redistributing the gradient of a weight to it, without the latency.

        With the latency, small activations would be all-gathered in the forward pass instead. That
        sends more: the rows of a batch are larger than the results of a last layer.
        """
        return self._transition_cost(source, target, axis, held) - self._transition_cost(
            source, target, axis, 0
        )

    def _transition_cost(
        self, source: Placement, target: Placement, axis: str, held: float
    ) -> float:
        """Returns the cost of redistributing `held` bytes along `axis`."""
        if source != target and isinstance(target, Partial):  # computed from the full tensor
            target = Replicate()
        ranks = self.call.mesh.axis_size(axis)
        return self.call.costs.collective(transition(source, target), axis, ranks, held)


def _group_bytes(operand: PlacedTensor, axis: str) -> float:
    """Returns the bytes that the ranks of one group along `axis` hold together."""
    mesh = operand.layout.mesh
    others = prod(
        mesh.axis_size(other)
        for other in mesh.axis_names
        if other != axis and operand.is_sharded_over(other)
    )
    return prod(operand.shape) * operand.itemsize / others
