"""The mesh axes over which policies shard, the specs that they give, and the bytes they save."""

from collections.abc import Iterable

from shardcore.domain.errors import PolicyError
from shardcore.domain.layouts.mesh import Mesh
from shardcore.ports.policy import Choice, Spec, VariableFacts

# Below this the latency of a collective dominates: it is 10 to 50 µs, in which a link of 5 GB/s
# moves 50 to 250 KB. Biases and norms, which are many, are below it.
SMALL = 64 * 1024


def saves(variable: VariableFacts, spec: Spec, mesh: Mesh) -> int:
    """The bytes that a sharding saves every rank at least."""
    return variable.bytes - variable.bytes_here(spec, mesh)


def replicated(variable: VariableFacts) -> Spec:
    """The spec that shards nothing."""
    return (None,) * len(variable.shape)


def all_replicated(variables: Iterable[VariableFacts], why: str) -> dict[str, Choice]:
    """Replicates `variables`, all for the same reason."""
    return {
        variable.path: Choice(replicated(variable), f"replicated: {why}") for variable in variables
    }


def sharded(variable: VariableFacts, dim: int, axis: str) -> Spec:
    """The spec that shards one dim.

    Example:
        >>> sharded(VariableFacts("kernel", (4, 8)), -1, "model")
        (None, 'model')
    """
    spec: list[str | None] = [None] * len(variable.shape)
    spec[dim] = axis
    return tuple(spec)


def batch_axis(mesh: Mesh, axis: str | None) -> str:
    """Checks `axis`, by default the first one, as in `ModelParallel`.

    Raises:
        MeshError: If the mesh has no such axis.
    """
    name = mesh.axis_names[0] if axis is None else axis
    mesh.axis_index(name)
    return name


def check_batch_apart(policy: str, axis: str, batch: str) -> None:
    """Checks that the axis of sequences is not that of the batch.

    Raises:
        PolicyError: If it is.
    """
    if axis == batch:
        raise PolicyError(
            f"Policy {policy!r} shards the sequence over {axis!r}, which shards the batch "
            "too: give the axes, axis=... and batch=..., or add one to the mesh.",
            name=axis,
        )


def model_axis(
    mesh: Mesh, axis: str | None, policy: str = "tensor_parallel", name: str = "model"
) -> str:
    """Checks `axis`, by default the last one; an error names `policy`, and `name` for the axis.

    Raises:
        MeshError: If the mesh has no such axis.
        PolicyError: If the mesh has only one axis, which shards the batch.
    """
    if axis is None and mesh.ndim == 1:
        raise PolicyError(
            f"Policy {policy!r} needs an axis beside that of the batch, and mesh {mesh} has "
            f"one axis: make it DeviceMesh((1, {mesh.size}), ('{mesh.axis_names[0]}', '{name}')), "
            "in which each rank gets all rows, or take policy 'fully_sharded'.",
            name=policy,
        )
    name = mesh.axis_names[-1] if axis is None else axis
    mesh.axis_index(name)
    return name
