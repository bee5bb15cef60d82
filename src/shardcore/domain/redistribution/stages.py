"""Redistribution of tensors with dims in segments, as stages of steps on separate dims.

A stage is on a tensor with a separate dim for the segments of each dim. If no one shape has the
segments of both layouts as dims, the dims that differ are all-gathered first, or exchanged.
"""

from functools import lru_cache
from itertools import pairwise

import attrs

from shardcore.domain.layout import Layout
from shardcore.domain.machines.collective_cost import Costs
from shardcore.domain.redistribution.exchange import Exchange
from shardcore.domain.redistribution.plan import Step, plan
from shardcore.domain.redistribution.segments import has_segments, ranges_of, without_segments


@attrs.frozen
class Stage:
    """Steps that follow one another on a tensor of one shape."""

    shape: tuple[int, ...]  # the global shape, with a separate dim for the segments of a dim
    layout: Layout  # the layout of a tensor of that shape before the steps
    steps: tuple[Step | Exchange, ...]


@lru_cache(maxsize=4096)
def stages(
    source: Layout, target: Layout, shape: tuple[int, ...], itemsize: int, costs: Costs
) -> tuple[Stage, ...]:
    """Returns the stages from one layout to another, of a tensor of global `shape`.

    Example:
        >>> from shardcore.domain.mesh import Mesh
        >>> from shardcore.domain.placements import Segments
        >>> mesh = Mesh((2, 2), ("data", "model"))
        >>> both = Layout(mesh, (("data", "model"),), blocks=(Segments(4, outer=1),))
        >>> (stage,) = stages(both, Layout(mesh, ("data",)), (24,), 4, Costs())
        >>> stage.shape, str(stage.layout), [str(step) for step in stage.steps]
        ((4, 6), "('data', 'model')", ["all_gather over 'model': S(1) -> R"])
    """
    counts = tuple(map(max, source.segments, target.segments))
    layouts = [source, target]
    if not all(has_segments(layout, shape, counts) for layout in layouts):
        exchange = _between_segments(source, target, shape)
        if exchange is not None:
            return (Stage(shape, source, (exchange,)),)
        pairs = zip(source.segments, target.segments, strict=True)
        differ = [dim for dim, (before, after) in enumerate(pairs) if before != after]
        axes = [axis for dim in differ for axis in source.dim_axes(dim)]
        layouts = [source, source.without(*axes), target]
    stage_list = []
    for before, after in pairwise(layouts):
        common = tuple(map(max, before.segments, after.segments))
        sizes, first = without_segments(before, shape, common)
        _, second = without_segments(after, shape, common)
        stage_list.append(Stage(sizes, first, plan(first, second, sizes, itemsize, costs)))
    return tuple(stage_list)


def _between_segments(source: Layout, target: Layout, shape: tuple[int, ...]) -> Exchange | None:
    """Returns the exchange between two layouts that differ in the segments of one dim.

    None if they differ in more, or several axes shard the dim.
    """
    differ = [dim for dim in range(source.ndim) if source.blocks[dim] != target.blocks[dim]]
    same = source.spec == target.spec and source.partial == target.partial
    if not same or len(differ) != 1 or len(source.dim_axes(differ[0])) != 1:
        return None
    (dim,) = differ
    (axis,) = source.dim_axes(dim)
    held, wanted = (ranges_of(layout, dim, shape[dim]) for layout in (source, target))
    return Exchange(axis, dim, held, wanted)
