"""All ranks of a mesh in one process, as NumPy arrays: an executor that shares no arithmetic.

It shards with its own chunks, and joins shards in the order of the axes.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np

from shardcore.domain.layouts.layout import Layout
from shardcore.domain.layouts.mesh import Mesh
from shardcore.domain.layouts.placements import Partial, Placement, Shard, segments_of

Array: TypeAlias = "np.ndarray[Any, Any]"
Coordinate: TypeAlias = tuple[int, ...]
Shape: TypeAlias = tuple[int, ...]

_REDUCTIONS: dict[str, Callable[..., Array]] = {
    "sum": np.sum,
    "max": np.max,
    "min": np.min,
    "product": np.prod,
}


def check_shards(
    run: Callable[[list[Array], int], Sequence[Array]],
    operands: Sequence[tuple[Array, Layout]],
    results: Sequence[tuple[Array, Layout]],
    tolerance: float = 1e-9,
) -> None:
    """Checks that what each rank computes from its shards is its shard of the full results.

    Args:
        run: Computes the results from the operands of a rank, and the rank.
        operands: The full operands, with their layouts.
        results: The full results, with their layouts.
        tolerance: How far numbers may differ, relative to the largest of them.

    Raises:
        AssertionError: If it is not; or if a rank has no element of an operand.

    Example:
        >>> x, mesh = np.arange(6.0).reshape(3, 2), Mesh((2,), ("data",))
        >>> rows, summed = Layout(mesh, ("data", None)), Layout(mesh, (None,), {"data": "sum"})
        >>> check_shards(lambda parts, rank: [parts[0].sum(0)], [(x, rows)], [(x.sum(0), summed)])
    """
    mesh = operands[0][1].mesh
    shards = [shards_of(mesh, value, layout) for value, layout in operands]
    computed = {
        at: run([shard[at] for shard in shards], rank) for rank, at in enumerate(coordinates(mesh))
    }
    for number, (full, layout) in enumerate(results):
        parts = {at: np.asarray(of_rank[number]) for at, of_rank in computed.items()}
        for rank, part in enumerate(parts.values()):
            expected = layout.local_shape(full.shape, rank)
            assert part.shape == expected, f"rank {rank} has shape {part.shape}, not {expected}"
        size = np.abs(full[np.isfinite(full)]).max(initial=0.0)
        joined = join_shards(mesh, parts, layout, full.shape, tolerance * size)
        np.testing.assert_allclose(joined, full, rtol=1e-7, atol=tolerance * size)


def coordinates(mesh: Mesh) -> list[Coordinate]:
    """Lists the coordinate of each rank of `mesh`."""
    return list(np.ndindex(*mesh.shape))


def chunks(array: Array, parts: int, dim: int, block: int = 1) -> list[Array]:
    """Cuts `array` by the rule of torch.chunk, over blocks of `dim`, of which the last is smaller.

    Padded with empty chunks to `parts`.
    """
    indices = np.arange(array.shape[dim])
    blocks = [indices[start : start + block] for start in range(0, len(indices), block)]
    step = max(1, -(-len(blocks) // parts))
    chunked = [[indices[:0], *blocks[k * step : (k + 1) * step]] for k in range(parts)]
    return [array.take(np.concatenate(chunk), dim) for chunk in chunked]


def scatter(layout: Layout, contributions: Array) -> dict[Coordinate, Array]:
    """Cuts the shards of all ranks. The leading dims of `contributions` are the partial axes."""
    names = layout.mesh.axis_names
    shards = {}
    for at in coordinates(layout.mesh):
        part = contributions[tuple(at[names.index(axis)] for axis, _ in layout.partial)]
        for dim in range(layout.ndim):
            segments = segments_of(layout.blocks[dim])
            size = part.shape[dim] // segments.count
            part = part.reshape(*part.shape[:dim], segments.count, size, *part.shape[dim + 1 :])
            for position, axis in enumerate(layout.dim_axes(dim)):
                i = names.index(axis)
                along, block = (
                    (dim, segments.outer_block)
                    if position < segments.outer
                    else (dim + 1, segments.block)
                )
                part = chunks(part, layout.mesh.shape[i], along, block)[at[i]]
            size = part.shape[dim] * part.shape[dim + 1]
            part = part.reshape(*part.shape[:dim], size, *part.shape[dim + 2 :])
        shards[at] = part
    return shards


def shards_of(mesh: Mesh, value: Array, layout: Layout) -> dict[Coordinate, Array]:
    """Cuts `value` for each rank. Of a partial sum the first rank of an axis has all."""
    sizes = [mesh.axis_size(axis) for axis, _ in layout.partial]
    contributions = np.zeros((*sizes, *value.shape), value.dtype)
    contributions[(0,) * len(layout.partial)] = value
    shards = scatter(layout, contributions)
    assert all(part.size for part in shards.values()), f"an empty part of {value.shape}, {layout}"
    return shards


def join_shards(
    mesh: Mesh,
    parts: Mapping[Coordinate, Array],
    layout: Layout,
    shape: Shape,
    tolerance: float = 1e-9,
) -> Array:
    """Joins the shards of all ranks to the full tensor, along the minor axes first."""
    nested = [axis for dim in range(layout.ndim) for axis in layout.dim_axes(dim)]
    order = [*nested, *(axis for axis in mesh.axis_names if axis not in nested)]
    by_coordinate = {
        tuple(at[mesh.axis_index(axis)] for axis in order): part for at, part in parts.items()
    }
    for axis in reversed(order):
        groups: dict[Coordinate, list[Array]] = {}
        for at in sorted(by_coordinate):
            groups.setdefault(at[:-1], []).append(by_coordinate[at])
        placement = layout.placement(axis)
        if isinstance(placement, Shard) and layout.dim_axes(placement.dim).index(axis) < (
            segments_of(placement.block).outer
        ):
            placement = Shard(placement.dim)  # whole segments
        by_coordinate = {
            at: _join_group(group, placement, shape, tolerance) for at, group in groups.items()
        }
    return by_coordinate[()]


def _join_group(group: list[Array], placement: Placement, shape: Shape, tolerance: float) -> Array:
    match placement:
        case Shard(dim, blocks):
            count = (of_dim := segments_of(blocks)).count
            if of_dim.outer:  # each of the group has parts of the same segments, of some of them
                count = sum(part.shape[dim] for part in group) * count // shape[dim]
            apart = [
                part.reshape(*part.shape[:dim], count, -1, *part.shape[dim + 1 :]) for part in group
            ]
            full = np.concatenate(apart, dim + 1)
            size = full.shape[dim] * full.shape[dim + 1]
            return full.reshape(*full.shape[:dim], size, *full.shape[dim + 2 :])
        case Partial(op):
            return _REDUCTIONS[op](group, axis=0)
    for copy in group[1:]:
        np.testing.assert_allclose(copy, group[0], rtol=1e-7, atol=tolerance)
    return group[0]
