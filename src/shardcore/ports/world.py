"""The processes of a job, and a mesh over them: what a strategy is opened on."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Protocol, TypeVar

import attrs

from shardcore.domain.errors import MeshError
from shardcore.domain.layouts.mesh import Mesh

_Fact = TypeVar("_Fact")


@attrs.frozen
class World:
    """A mesh laid over the processes of this job.

    Args:
        mesh: The mesh.
        processes: The process rank at each position of the mesh, in row-major order.
        process: The rank of this process.
        device_type: The type of the device that holds the tensors: "cpu", "cuda", "mps" or "xpu".

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
                f"{self.processes}: give each device once.",
                got=str(self.processes),
            )
        if self.process not in self.processes:
            raise MeshError(
                f"Process {self.process} is not in mesh {self.mesh} over processes "
                f"{self.processes}: a mesh spans all processes of the job."
            )

    @property
    def position(self) -> int:
        """The position of this process in the mesh: its rank in every layout."""
        return self.processes.index(self.process)

    def peers(self, axis: str, position: int | None = None) -> tuple[int, ...]:
        """Lists the positions along `axis`, in the order of their process group: by process.

        They are the peers of the process at `position`, by default of this one.

        Example:
            >>> world = World(Mesh((2,), ("data",)), processes=(1, 0), process=1, device_type="cpu")
            >>> world.peers("data")
            (1, 0)
        """
        peers = self.mesh.axis_group(axis, self.position if position is None else position)
        return tuple(sorted(peers, key=self.processes.__getitem__))


class Processes(Protocol):
    """The processes of the job. One device is a job of one process."""

    def initialize(
        self,
        job_addresses: str | None = None,
        num_processes: int | None = None,
        process_id: int | None = None,
    ) -> bool:
        """Joins the job, once; without a launcher does nothing. Returns whether it joined now."""

    @property
    def rank(self) -> int:
        """The rank of this process, 0 without a launcher."""

    @property
    def world_size(self) -> int:
        """The number of processes, 1 without a launcher."""

    @property
    def hosts(self) -> tuple[str, ...]:
        """The name of the host of each process, in rank order; empty before it has joined."""

    @property
    def launched(self) -> int:
        """The number of processes that the launcher started, also before they join the job."""

    @property
    def device_type(self) -> str:
        """The type of the device that holds the tensors: "cpu", "cuda", "mps" or "xpu"."""

    def gather(self, fact: _Fact, what: str = "a comparison of values") -> list[_Fact]:
        """Collects the `fact` of every process, in rank order. All call it, on the main thread.

        Args:
            fact: It can be pickled.
            what: The call that needs it, for the error.
        """

    def barrier(self, what: str) -> None:
        """Waits until every process has called it with the same `what`.

        It waits for `SHARDCORE_TIMEOUT` at most; less if the others are known to be elsewhere.

        Args:
            what: The call, for the error: "fit() of model 'net'".

        Raises:
            RankMismatchError: If a process does not call it, or calls it with another `what`.
        """

    def send_bytes(self, data: memoryview, source: int, others: Sequence[int]) -> None:
        """Copies `data` of process `source` into that of the `others`. These processes call it.

        Args:
            data: As many bytes on each of them.
            source: The process that sends.
            others: Those that receive.
        """

    def do_once(self, work: Callable[[], _Fact], what: str) -> _Fact:
        """Does `work` on one of the processes that come; returns its result on each of them.

        It is process 0, or the first that comes if process 0 does not within a second.

        Args:
            work: The work; its result can be pickled.
            what: Its name: "save 'a.keras'".
        """

    def collective_call(self, what: str) -> AbstractContextManager[None]:
        """Opens a context for the call `what`, which every process makes; begins with `barrier`.

        Raises:
            RankMismatchError: As `barrier`; or for torch's error of a process that has ended.
        """

    def points(self, saves: bool) -> AbstractContextManager[None]:
        """Opens a part of the program in which every process passes the same points.

        Args:
            saves: Whether they save at the point at which they end after SIGTERM.
        """

    def pass_point(self, save: Callable[[], None]) -> None:
        """Passes such a point. After SIGTERM to a process, all call `save` at one of them, and end.

        Raises:
            OtherRankFailed: There.
        """
