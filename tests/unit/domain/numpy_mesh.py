"""All ranks of a mesh at once, as NumPy arrays: an executor of plans that shares no arithmetic
with the package. It splits with its own chunks and concatenates in axis order, as collectives do.
"""

from collections.abc import Callable

import numpy as np

from shardcore.domain.layout import Layout
from shardcore.domain.mesh import Mesh
from shardcore.domain.redistribution import Step

REDUCE: dict[str, Callable[..., np.ndarray]] = {
    "sum": np.sum,
    "avg": np.mean,
    "max": np.max,
    "min": np.min,
    "product": np.prod,
}


def coordinates(mesh: Mesh) -> list[tuple[int, ...]]:
    return list(np.ndindex(*mesh.shape))


def chunks(array: np.ndarray, parts: int, dim: int) -> list[np.ndarray]:
    """torch.chunk's rule, padded with empty chunks to `parts`."""
    size = array.shape[dim]
    step = max(1, -(-size // parts))
    return [array.take(range(k * step, min(size, (k + 1) * step)), dim) for k in range(parts)]


def scatter(layout: Layout, contributions: np.ndarray) -> dict[tuple[int, ...], np.ndarray]:
    """What every rank holds. The leading dims of `contributions` are the partial axes."""
    names = layout.mesh.axis_names
    held = {}
    for at in coordinates(layout.mesh):
        part = contributions[tuple(at[names.index(axis)] for axis, _ in layout.partial)]
        for dim in range(layout.ndim):
            for axis in layout.dim_axes(dim):
                i = names.index(axis)
                part = chunks(part, layout.mesh.shape[i], dim)[at[i]]
        held[at] = part
    return held


def reduced(layout: Layout, contributions: np.ndarray, keep: Layout) -> np.ndarray:
    """Contributions with every pending reduction of `layout` done that `keep` does not keep."""
    for position, (axis, op) in reversed(list(enumerate(layout.partial))):
        if (axis, op) not in keep.partial:
            contributions = REDUCE[op](contributions, axis=position)
    return contributions


def run(step: Step, held: dict[tuple[int, ...], np.ndarray]) -> dict[tuple[int, ...], np.ndarray]:
    """What every rank holds after the step."""
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
    match step.kind:
        case "slice":
            return chunks(group[me], len(group), step.target_dim)[me]
        case "all_gather":
            return np.concatenate(group, step.source_dim)
        case "all_to_all":
            mine = [chunks(array, len(group), step.target_dim)[me] for array in group]
            return np.concatenate(mine, step.source_dim)
        case "all_reduce":
            return REDUCE[step.op](np.stack(group), axis=0)
        case "reduce_scatter":
            return chunks(REDUCE[step.op](np.stack(group), axis=0), len(group), step.target_dim)[me]
