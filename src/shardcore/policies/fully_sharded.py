"""Policy `fully_sharded`: every rank holds a shard of every large variable.

A variable is all-gathered for each use, and its gradient is reduce-scattered.
"""

from shardcore.domain.layouts.mesh import Mesh
from shardcore.policies.specs import SMALL, batch_axis, replicated
from shardcore.ports.model import LayerFacts, VariableFacts
from shardcore.ports.policy import Choice, Spec


def plan(
    model: LayerFacts, mesh: Mesh, *, axis: str | None = None, small: int = SMALL
) -> dict[str, Choice]:
    """Shards every large variable over the batch axis.

    Args:
        model: The model.
        mesh: The mesh.
        axis: The axis that shards the batch, by default the first.
        small: A variable is sharded if that saves every rank this many bytes.
    """
    name = batch_axis(mesh, axis)
    return {
        variable.path: shard_further(variable, replicated(variable), mesh, name, small)
        for variable in model.all_variables()
    }


def shard_further(variable: VariableFacts, spec: Spec, mesh: Mesh, axis: str, small: int) -> Choice:
    """Returns `spec` with one more dim of the variable sharded over `axis`, if that pays."""

    def unchanged(why: str) -> Choice:
        return Choice(
            spec, f"not sharded over {axis!r}: {why}" if any(spec) else f"replicated: {why}"
        )

    parts = mesh.axis_size(axis)
    dim = _best_dim(variable.shape, spec, parts)
    if parts == 1:
        return unchanged(f"axis {axis!r} has one rank")
    if dim is None:
        return unchanged(f"no dim to shard over {axis!r}")
    further = (*spec[:dim], axis, *spec[dim + 1 :])
    spared = variable.bytes_here(spec, mesh) - variable.bytes_here(further, mesh)
    if spared < max(small, 1):
        return unchanged(f"sharding would save {spared} bytes only")
    even = variable.shape[dim] % parts == 0
    return Choice(further, f"dim {dim} sharded" if even else f"dim {dim} sharded, unevenly")


def _best_dim(shape: tuple[int, ...], spec: Spec, parts: int) -> int | None:
    """Returns the largest dim that `parts` divides, else the largest; of equal ones the first.

    A dim that is shorter than `parts` is not sharded: some ranks would have no element. Nor is a
    dim that `spec` shards.

    Example:
        >>> full = (None, None)
        >>> _best_dim((30, 8), full, 4), _best_dim((30, 9), full, 4), _best_dim((3, 3), full, 4)
        (1, 0, None)
        >>> _best_dim((30, 8), (None, "model"), 4)
        0
    """
    free = zip(shape, spec, strict=True)
    dims = [dim for dim, (size, axes) in enumerate(free) if size >= parts > 1 and not axes]
    even = [dim for dim in dims if shape[dim] % parts == 0]
    return max(even or dims, key=lambda dim: shape[dim], default=None)
