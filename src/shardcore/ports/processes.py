"""What the inside needs from the job: who is there, and small facts told to everybody."""

from typing import Any, Protocol


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
