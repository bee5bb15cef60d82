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

import attrs

from shardcore.domain.layout import Layout
from shardcore.domain.machines.collective_cost import Costs
from shardcore.domain.planner.call import Call, PlacedTensor, Shapes
from shardcore.domain.planner.costs import ShardingCosts
from shardcore.domain.planner.cuts import Cut
from shardcore.domain.rules.rule import OperatorRule, Result, Shape, letters


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
        """Returns the sharding of an operator whose tensors, all of `shape`, have these layouts."""
        extents = dict(zip(letters(len(shape)), shape, strict=True))
        return cls(tuple(operands), tuple(results), extents, gathers=False)

    def global_shape(self, result: Result, local: tuple[int, ...]) -> tuple[int, ...]:
        """Returns the global shape of `result`, whose local shard has shape `local`."""
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
    """Returns the cheapest sharding of an operator.

    `result_shapes` has the global shapes of the results. They are needed if the cost of reducing a
    result or of redistributing a gradient depends on the factor. If `scales`, it multiplies element
    by element: a weight is all-gathered if an activation of its size is replicated, and the result
    is not sharded.

    Raises:
        LayoutError: If the operands do not have the dims of the rule, or dims of one factor differ.

    Example:
        >>> from shardcore.domain.mesh import Mesh
        >>> from shardcore.domain.rules.rule import rule
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
    """Returns the sharding of an operator in which operand `number` stays as it is sharded.

    Some operators keep tensors for their gradient, which fit the rows that a rank computed. The
    gradient is then sharded as a result of the operator is, and not by another choice.

    Example:
        >>> from shardcore.domain.mesh import Mesh
        >>> from shardcore.domain.rules.rule import rule
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
    """Returns the sharding of `call` by `cuts`; the axes `unassigned` shard no factor."""
    # An unassigned axis all-gathers the activations that it shards; without any, the weights.
    moved = [operand for operand in call.operands if not operand.weight] or call.operands
    return Sharding(
        tuple(call.layout(term, cuts) for term in call.rule.operands),
        tuple(call.layout(term, cuts) for term in call.rule.results),
        call.extents,
        gathers=any(operand.is_sharded_over(axis) for axis in unassigned for operand in moved),
        replicates=replicates,
    )
