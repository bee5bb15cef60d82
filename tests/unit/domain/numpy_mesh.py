"""An executor of plans over `shardcore.testing.simulated_ranks`, as collectives do it."""

from collections.abc import Callable

import numpy as np

from shardcore.domain.engine.redistribution import Step
from shardcore.domain.layouts.layout import Layout
from shardcore.testing.simulated_ranks import chunks

REDUCE: dict[str, Callable[..., np.ndarray]] = {
    "sum": np.sum,
    "avg": np.mean,
    "max": np.max,
    "min": np.min,
    "product": np.prod,
}


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
