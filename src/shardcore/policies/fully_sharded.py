"""Policy `fully_sharded`: every rank holds a shard of every large variable.

A variable is all-gathered for each use, and its gradient is reduce-scattered.
"""

from shardcore.domain.mesh import Mesh
from shardcore.policies.splits import SMALL, batch_axis, replicated, saves, split
from shardcore.ports.model import LayerFacts, VariableFacts
from shardcore.ports.policy import Choice


def plan(
    model: LayerFacts, mesh: Mesh, *, axis: str | None = None, small: int = SMALL
) -> dict[str, Choice]:
    """Splits every large variable over the batch axis.

    Args:
        model: The model.
        mesh: The mesh.
        axis: The axis that splits the batch, by default the first.
        small: A variable is split if that saves every rank this many bytes.
    """
    name = batch_axis(mesh, axis)
    return {each.path: _choice(each, mesh, name, small) for each in model.all_variables()}


def _choice(variable: VariableFacts, mesh: Mesh, axis: str, small: int) -> Choice:
    dim = _best_dim(variable.shape, mesh.axis_size(axis))
    if mesh.axis_size(axis) == 1:
        return Choice(replicated(variable), f"replicated: axis {axis!r} has one rank")
    if dim is None:
        return Choice(replicated(variable), f"replicated: no dim to split over {axis!r}")
    spec = split(variable, dim, axis)
    spared = saves(variable, spec, mesh)
    if spared < max(small, 1):
        return Choice(replicated(variable), f"replicated: a split would spare {spared} bytes only")
    parts = mesh.axis_size(axis)
    even = variable.shape[dim] % parts == 0
    return Choice(spec, f"dim {dim} split" if even else f"dim {dim} split, unevenly")


def _best_dim(shape: tuple[int, ...], parts: int) -> int | None:
    """Returns the largest dim that `parts` divides, else the largest; of equal ones the first.

    A dim that is shorter than `parts` is not split: some ranks would have no element.

    Example:
        >>> _best_dim((30, 8), 4), _best_dim((30, 9), 4), _best_dim((3, 3), 4)
        (1, 0, None)
    """
    dims = [dim for dim, size in enumerate(shape) if size >= parts > 1]
    even = [dim for dim in dims if shape[dim] % parts == 0]
    return max(even or dims, key=lambda dim: shape[dim], default=None)
