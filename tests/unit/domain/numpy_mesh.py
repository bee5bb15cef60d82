"""All ranks of a mesh at once, as NumPy arrays: an executor of plans that shares no arithmetic
with the package. It shards with its own chunks and concatenates in axis order, as collectives do.
"""

from collections.abc import Callable

import numpy as np

from shardcore.domain.engine.redistribution import Step
from shardcore.domain.layouts.layout import Layout
from shardcore.domain.layouts.mesh import Mesh
from shardcore.domain.layouts.placements import segments_of

REDUCE: dict[str, Callable[..., np.ndarray]] = {
    "sum": np.sum,
    "avg": np.mean,
    "max": np.max,
    "min": np.min,
    "product": np.prod,
}


def coordinates(mesh: Mesh) -> list[tuple[int, ...]]:
    return list(np.ndindex(*mesh.shape))


def chunks(array: np.ndarray, parts: int, dim: int, block: int = 1) -> list[np.ndarray]:
    """torch.chunk's rule over blocks of `dim`, the last one of which may be smaller.

    Padded with empty chunks to `parts`.
    """
    places = np.arange(array.shape[dim])
    blocks = [places[start : start + block] for start in range(0, len(places), block)]
    step = max(1, -(-len(blocks) // parts))
    chunked = [[places[:0], *blocks[k * step : (k + 1) * step]] for k in range(parts)]
    return [array.take(np.concatenate(each), dim) for each in chunked]


def scatter(layout: Layout, contributions: np.ndarray) -> dict[tuple[int, ...], np.ndarray]:
    """The local shards of all ranks. The leading dims of `contributions` are the partial axes."""
    names = layout.mesh.axis_names
    held = {}
    for at in coordinates(layout.mesh):
        part = contributions[tuple(at[names.index(axis)] for axis, _ in layout.partial)]
        for dim in range(layout.ndim):
            each = segments_of(layout.blocks[dim])
            segment = part.shape[dim] // each.count
            part = part.reshape(*part.shape[:dim], each.count, segment, *part.shape[dim + 1 :])
            for place, axis in enumerate(layout.dim_axes(dim)):
                i = names.index(axis)
                along, block = (
                    (dim, each.outer_block) if place < each.outer else (dim + 1, each.block)
                )
                part = chunks(part, layout.mesh.shape[i], along, block)[at[i]]
            size = part.shape[dim] * part.shape[dim + 1]
            part = part.reshape(*part.shape[:dim], size, *part.shape[dim + 2 :])
        held[at] = part
    return held


def reduced(layout: Layout, contributions: np.ndarray, keep: Layout) -> np.ndarray:
    """Contributions with every pending reduction of `layout` done that `keep` does not keep."""
    for position, (axis, op) in reversed(list(enumerate(layout.partial))):
        if (axis, op) not in keep.partial:
            contributions = REDUCE[op](contributions, axis=position)
    return contributions


def run(step: Step, held: dict[tuple[int, ...], np.ndarray]) -> dict[tuple[int, ...], np.ndarray]:
    """The local shards of all ranks after the step."""
    i = step.source.mesh.axis_names.index(step.axis)
    parts = step.source.mesh.shape[i]
    after = {}
    for at in held:
        group = [held[(*at[:i], k, *at[i + 1 :])] for k in range(parts)]
        after[at] = _after(step, group, at[i])
    return after


def _after(step: Step, group: list[np.ndarray], me: int) -> np.ndarray:
    if len(group) == 1:
        assert step.kind == "slice", "an axis of one rank needs no collective"
        return group[0]

    def my_chunk(array: np.ndarray) -> np.ndarray:
        dim = step.target_dim
        return chunks(array, len(group), dim, step.target.blocks[dim])[me]

    match step.kind:
        case "slice":
            return my_chunk(group[me])
        case "all_gather":
            return np.concatenate(group, step.source_dim)
        case "all_to_all":
            return my_chunk(np.concatenate(group, step.source_dim))
        case "all_reduce":
            return REDUCE[step.op](np.stack(group), axis=0)
        case "reduce_scatter":
            return my_chunk(REDUCE[step.op](np.stack(group), axis=0))
