"""Layouts that follow from another one: with other dims, or with pending reductions."""

from collections.abc import Iterable, Sequence
from functools import lru_cache

from shardcore.domain.layouts.layout import Layout, PartialAxes
from shardcore.domain.layouts.placements import Partial, ReduceOp, Replicate


def with_dims(layout: Layout, dims: Sequence[int]) -> Layout:
    """Picks `dims` of a layout, in this order.

    Example:
        >>> from shardcore.domain.layouts.mesh import Mesh
        >>> str(with_dims(Layout(Mesh((2,), ("data",)), ("data", None, None)), (2, 0)))
        "(None, 'data')"
    """
    spec = tuple(layout.spec[dim] for dim in dims)
    return Layout(layout.mesh, spec, layout.partial, (layout.blocks[dim] for dim in dims))


def without_blocks(layout: Layout, dim: int) -> Layout:
    """Cuts `dim` between any two elements: its blocks become 1."""
    blocks = [1 if block_dim == dim else block for block_dim, block in enumerate(layout.blocks)]
    return Layout(layout.mesh, layout.spec, layout.partial, blocks)


def with_pending(layout: Layout, pending: PartialAxes) -> Layout:
    """Adds reductions that are still to be done."""
    return Layout(layout.mesh, layout.spec, (*layout.partial, *pending), layout.blocks)


# The neutral values of reductions; a mean or a maximum of equal values is that value.
_NEUTRAL = {"sum": 0, "product": 1}


def layout_on_first_ranks(layout: Layout, target: Layout, rank: int) -> tuple[Layout, int | None]:
    """Lays out a tensor that becomes partial, with its values on the first ranks.

    The first rank of each newly partial axis holds the values, and the others hold neutral ones:
    0 in a sum, 1 in a product.

    Args:
        layout: The layout of the tensor before.
        target: The layout after, which may be partial along more axes.
        rank: The rank that asks.

    Returns:
        `target` without the new reductions; and the neutral value if `rank` holds it, else None.

    Example:
        >>> from shardcore.domain.layouts.mesh import Mesh
        >>> layout = Layout(Mesh((2,), ("data",)), (None,))
        >>> target = Layout(layout.mesh, (None,), {"data": "sum"})
        >>> layout_on_first_ranks(layout, target, 0) == (layout, None)
        True
        >>> layout_on_first_ranks(layout, target, 1) == (layout, 0)
        True
    """
    have, mesh = layout.placement, layout.mesh
    kept = tuple((axis, op) for axis, op in target.partial if have(axis) == Partial(op))
    filled = Layout(target.mesh, target.spec, kept, target.blocks)
    others = (
        op
        for axis, op in target.partial
        if (axis, op) not in kept and mesh.position_along([axis], rank)
    )
    return filled, next((_NEUTRAL[op] for op in others if op in _NEUTRAL), None)


@lru_cache(maxsize=4096)
def reduced_by_ranks(layout: Layout, dim: int, op: ReduceOp) -> Layout:
    """Lays out a tensor that each rank has reduced along its shard of `dim`.

    Example:
        >>> from shardcore.domain.layouts.mesh import Mesh
        >>> layout = Layout(Mesh((2, 2), ("data", "model")), ("data", "model"))
        >>> str(reduced_by_ranks(layout, 1, "max"))
        "('data', None) with max over 'model'"
    """
    axes = layout.dim_axes(dim)
    pending = tuple((axis, op) for axis in axes if layout.mesh.axis_size(axis) > 1)
    return with_pending(layout.without(*axes), pending)


def broadcast_layout(layout: Layout, shape: tuple[int, ...], other: tuple[int, ...]) -> Layout:
    """Lays out, reduced, a tensor of shape `other` that is broadcast to `shape`.

    Each rank has the elements that meet those of its shard of a tensor in `layout`.

    Example:
        >>> from shardcore.domain.layouts.mesh import Mesh
        >>> layout = Layout(Mesh((2, 2), ("data", "model")), ("data", "model"))
        >>> [str(broadcast_layout(layout, (4, 6), shape)) for shape in ((6,), (4, 1))]
        ["('model',)", "('data', None)"]
    """
    new = len(shape) - len(other)
    last = with_dims(layout.reduced, range(new, len(shape)))
    once = [
        axis
        for dim, size in enumerate(other)
        if size != shape[new + dim]
        for axis in last.dim_axes(dim)
    ]
    return last.without(*once)


def newly_sharded_dims(repeats: Sequence[int], layout: Layout, target: Layout) -> tuple[int, ...]:
    """Lists the dims of `repeats` that `target` shards by axes that shard others in `layout`.

    Example:
        >>> from shardcore.domain.layouts.mesh import Mesh
        >>> mesh = Mesh((2,), ("data",))
        >>> newly_sharded_dims([1], Layout(mesh, ("data", None)), Layout(mesh, (None, "data")))
        (1,)
    """
    if layout.partial or target.partial:
        return ()
    taken = {axis for dim in range(layout.ndim) for axis in layout.dim_axes(dim)}
    return tuple(
        dim
        for dim in repeats
        if not layout.dim_axes(dim) and not taken.isdisjoint(target.dim_axes(dim))
    )


def is_less_sharded(layout: Layout, other: Layout) -> bool:
    """Tells whether `other` is `layout`, but replicated along some axes.

    Example:
        >>> from shardcore.domain.layouts.mesh import Mesh
        >>> layout = Layout(Mesh((2,), ("data",)), ("data", None))
        >>> is_less_sharded(layout, layout.without("data")), is_less_sharded(layout, layout)
        (True, False)
    """
    names = layout.mesh.axis_names
    moved = [axis for axis in names if layout.placement(axis) != other.placement(axis)]
    return bool(moved) and all(isinstance(other.placement(axis), Replicate) for axis in moved)


def pending_in_results(
    operands: Sequence[Layout], linear_in: Sequence[int], adds: Sequence[int]
) -> PartialAxes:
    """Finds the reductions of operands that stay pending in the results.

    Args:
        operands: The layouts of the operands.
        linear_in: The operands, by number, in each of which the operator is linear.
        adds: The operands, by number, that it adds, or chooses from.

    Example:
        >>> from shardcore.domain.layouts.mesh import Mesh
        >>> full = Layout(Mesh((2,), ("data",)), (None,))
        >>> sums, means = (Layout(full.mesh, (None,), {"data": op}) for op in ("sum", "avg"))
        >>> pending_in_results([sums, full], linear_in=[0], adds=[])
        (('data', 'sum'),)
        >>> pending_in_results([full, sums], linear_in=[], adds=[0, 1])
        (('data', 'sum'),)
        >>> pending_in_results([full, means], linear_in=[], adds=[0, 1])
        ()
    """
    numbers = [number for number, layout in enumerate(operands) if layout.partial]
    kinds = {operands[number].partial for number in numbers}
    if len(kinds) != 1:
        return ()
    (pending,) = kinds
    ops = {op for _, op in pending}
    if not ops <= {"sum", "avg"}:
        return ()
    if len(numbers) == 1 and numbers[0] in linear_in:
        return pending
    if not adds or not set(numbers) <= set(adds):
        return ()
    # The first rank adds operands that are not partial: to a sum, and not to a mean.
    return pending if ops == {"sum"} or len(numbers) == len(adds) else ()


def are_free(layouts: Iterable[Layout], pending: PartialAxes) -> bool:
    """Tells whether no layout uses an axis of `pending`."""
    placements = (layout.placement(axis) for layout in layouts for axis, _ in pending)
    return all(isinstance(placement, Replicate) for placement in placements)
