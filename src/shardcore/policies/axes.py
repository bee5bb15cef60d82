"""The mesh axis that a policy splits over."""

from shardcore.domain.errors import PolicyError
from shardcore.domain.mesh import Mesh


def batch_axis(mesh: Mesh, axis: str | None = None) -> str:
    """`axis`, by default the first one, as `ModelParallel` has it.

    Raises:
        MeshError: If the mesh has no such axis.
    """
    name = mesh.axis_names[0] if axis is None else axis
    mesh.axis_index(name)
    return name


def model_axis(mesh: Mesh, axis: str | None = None) -> str:
    """`axis`, by default the last one.

    Raises:
        MeshError: If the mesh has no such axis.
        PolicyError: If the mesh has one axis only, which splits the batch.
    """
    if axis is None and mesh.ndim == 1:
        raise PolicyError(
            f"Policy 'tensor_parallel' needs an axis beside that of the batch, and mesh {mesh} has "
            f"one axis: make it DeviceMesh((1, {mesh.size}), ('{mesh.axis_names[0]}', 'model')) "
            "to split variables only, or take policy 'fully_sharded'."
        )
    name = mesh.axis_names[-1] if axis is None else axis
    mesh.axis_index(name)
    return name
