"""The processes of a job as one of them sees them: what a strategy is opened on."""

import attrs

from shardcore.domain.errors import MeshError
from shardcore.domain.mesh import Mesh


@attrs.frozen
class World:
    """A mesh laid over the processes of this job.

    Args:
        mesh: The mesh.
        processes: The process rank at each position of the mesh, in row-major order.
        process: The rank of this process.
        device_type: What the tensors live on: "cpu" or "cuda".

    Raises:
        MeshError: If the mesh does not hold each process once, or not this one.

    Example:
        >>> world = World(Mesh((2,), ("data",)), processes=(1, 0), process=1, device_type="cpu")
        >>> world.position
        0
    """

    mesh: Mesh
    processes: tuple[int, ...]
    process: int
    device_type: str

    def __attrs_post_init__(self) -> None:
        if len(self.processes) != self.mesh.size or len(set(self.processes)) != self.mesh.size:
            raise MeshError(
                f"Mesh {self.mesh} needs {self.mesh.size} different processes, got "
                f"{self.processes}: give each device once."
            )
        if self.process not in self.processes:
            raise MeshError(
                f"Process {self.process} is not in mesh {self.mesh} over processes "
                f"{self.processes}: a mesh spans all processes of the job."
            )

    @property
    def position(self) -> int:
        """Where this process is in the mesh: the rank that the layouts mean."""
        return self.processes.index(self.process)
