"""The processes of a job, and a mesh over them: what a strategy is opened on."""

from typing import Any, Protocol

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


class Processes(Protocol):
    """The processes of the job. One device is a job of one process."""

    def initialize(
        self,
        job_addresses: str | None = None,
        num_processes: int | None = None,
        process_id: int | None = None,
    ) -> bool:
        """Join the job, once; without a launcher do nothing. Tells whether it joined just now."""

    @property
    def rank(self) -> int:
        """The rank of this process, 0 without a launcher."""

    @property
    def world_size(self) -> int:
        """The number of processes, 1 without a launcher."""

    @property
    def device_type(self) -> str:
        """What tensors live on here: "cpu" or "cuda"."""

    def gather(self, fact: Any) -> list[Any]:
        """`fact` of every process, in rank order. All processes call it, on their main thread."""

    def meet(self, what: str) -> None:
        """Go on when every process has come to the same place, in a minute at most.

        Args:
            what: The place, for the error: "model.save('a.keras')".

        Raises:
            RankMismatchError: If a process did not come, or came to another place.
        """
