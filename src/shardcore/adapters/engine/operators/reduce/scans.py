"""Running sums along a sharded dim: each rank adds the totals of the ranks before it."""

from typing import Any

from shardcore.adapters.engine.moves.redistribution import in_layout, reduced
from shardcore.adapters.engine.operators.movement.views import along_one
from shardcore.adapters.engine.plans.task import Handler, Operand, Planner, Task, by_operator
from shardcore.adapters.engine.tensor import ShardedTensor
from shardcore.adapters.torch_private import Operator
from shardcore.domain.derived_layouts import without_blocks


def _cumsum(operator: Operator, tensor: Operand, dim: int, **_kwargs: object) -> Task | Handler:
    """Plans `cumsum(tensor, dim)`; parts of a dim in segments do not follow one another."""
    if tensor.ndim and tensor.is_sharded(dim) and tensor.form.layout.segments[dim] == 1:
        return _of_sharded
    return along_one(operator, [tensor], tensor.ndim, dim)


def _of_sharded(operator: Operator, x: ShardedTensor, dim: int, **kwargs: object) -> Any:
    """Runs `cumsum` along a sharded dim; the ranks send one total for each of its lines."""
    x, dim = reduced(x), dim % x.ndim
    engine, layout = x.engine, x.form.layout
    axes, shape = layout.dim_axes(dim), tuple(x.shape)
    part = operator(x.part, dim, **kwargs)
    own = x.part.sum(dim, keepdim=True, dtype=part.dtype)
    of_ranks = without_blocks(layout, dim)
    sizes = (*shape[:dim], layout.mesh.size_along(axes), *shape[dim + 1 :])
    totals = in_layout(engine.sharded(own, of_ranks, sizes), of_ranks.without(*axes)).part
    before = of_ranks.slices(sizes, engine.world.position)[dim].start
    return engine.sharded(part + totals.narrow(dim, 0, before).sum(dim, True), layout, shape)


PLANNERS: dict[Any, Planner] = by_operator({"cumsum": _cumsum})
