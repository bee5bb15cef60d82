"""Policies of data parallelism: `data_parallel`, `fully_sharded` and `hybrid_sharded`.

Each rank computes its own rows of the batch. Under `data_parallel` it holds every variable. Under
`fully_sharded` it holds a shard of every large one, which is all-gathered for each use, and whose
gradient is reduce-scattered.

`hybrid_sharded` does so inside each group of ranks that are near each other, such as those of a
host: each group holds a model in shards, on a mesh `(replica, shard, model)` or `(replica, shard)`.
A gradient is reduce-scattered inside the group, and its shards are all-reduced across groups. With
a model axis `tensor_parallel` shards kernels over it first. The batch is sharded over
`("replica", "shard")`.
"""

from shardcore.domain.errors import PolicyError
from shardcore.domain.layouts.mesh import Mesh
from shardcore.policies import tensor_parallel
from shardcore.policies.specs import SMALL, all_replicated, batch_axis, replicated
from shardcore.ports.policy import Choice, LayerFacts, Spec, VariableFacts


def plan(model: LayerFacts, mesh: Mesh, *, axis: str | None = None) -> dict[str, Choice]:
    """Replicates every variable.

    Args:
        model: The model.
        mesh: The mesh.
        axis: The axis that shards the batch, by default the first.
    """
    reason = f"gradients are summed over {batch_axis(mesh, axis)!r}"
    variables = model.all_variables()
    not_trained = all_replicated(
        (variable for variable in variables if not variable.trainable), "not trained"
    )
    return all_replicated(variables, reason) | not_trained


def plan_fully_sharded(
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
        variable.path: _shard_further(variable, replicated(variable), mesh, name, small)
        for variable in model.all_variables()
    }


def _shard_further(
    variable: VariableFacts, spec: Spec, mesh: Mesh, axis: str, small: int
) -> Choice:
    """Shards one more dim of the variable over `axis`, if that saves `small` bytes."""

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
    """Finds the largest dim that `parts` divides, else the largest; of equal ones the first.

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


def plan_hybrid_sharded(
    model: LayerFacts, mesh: Mesh, *, shard: str | None = None, small: int = SMALL
) -> dict[str, Choice]:
    """Shards kernels over an axis behind `shard`, then every large variable over `shard`.

    Args:
        model: The model.
        mesh: The mesh.
        shard: The axis that shards variables, by default the second.
        small: A variable is sharded over `shard` if that saves every rank this many bytes, and a
            part of the model over the last axis if it has as many.

    Raises:
        PolicyError: If the mesh has fewer than two axes, or the axis is the first.
    """
    if mesh.ndim < 2 or shard == mesh.axis_names[0]:
        raise PolicyError(
            f"Policy 'hybrid_sharded' needs an axis of replicas and behind it one of shards, and "
            f"got mesh {mesh}, shard={shard!r}: make it DeviceMesh((hosts, ranks of a host), "
            "('replica', 'shard')), or take policy 'fully_sharded'.",
            name="shard",
            got=repr(shard),
        )
    name = mesh.axis_names[1] if shard is None else shard
    behind = mesh.axis_names[mesh.axis_index(name) + 1 :]
    variables = model.all_variables()
    chosen = (
        tensor_parallel.plan(model, mesh, axis=behind[-1], small=small)
        if behind
        else all_replicated(variables, "no axis of the model")
    )
    return {
        variable.path: _with_reason_before(variable, chosen[variable.path], mesh, name, small)
        for variable in variables
    }


def _with_reason_before(
    variable: VariableFacts, before: Choice, mesh: Mesh, axis: str, small: int
) -> Choice:
    """Shards one more dim of a choice of `tensor_parallel`, whose reason comes first."""
    choice = _shard_further(variable, before.spec, mesh, axis, small)
    return Choice(choice.spec, f"{before.reason}; {choice.reason}") if any(before.spec) else choice
