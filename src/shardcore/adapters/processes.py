"""The port `Processes` by `torch.distributed`: joined once, watched from then on."""

import atexit
import os
from typing import Any

import attrs

from shardcore.adapters import process_group
from shardcore.adapters.failure import FailureWatch
from shardcore.adapters.meeting import Meetings
from shardcore.domain.job import resolve_job


@attrs.define
class TorchProcesses:
    """The job of this process. Joining outlives an uninstall: a process joins once."""

    _meetings: Meetings | None = attrs.field(default=None, init=False)

    def initialize(
        self,
        job_addresses: str | None = None,
        num_processes: int | None = None,
        process_id: int | None = None,
    ) -> bool:
        """Join the job that the arguments, Keras' variables or torchrun's describe.

        Arguments win over `KERAS_DISTRIBUTION_*`, which win over torchrun's. A process group
        that the user has started is adopted. Without any of these, nothing is done.

        Returns:
            Whether this call joined the job.

        Raises:
            EnvironmentProblem: If the description is incomplete, contradicts itself or the group
                that is there, or the other processes did not come.
        """
        given = (job_addresses, num_processes, process_id)
        if self._meetings is not None and given == (None, None, None):
            return False
        job = resolve_job(*given, environ=os.environ)
        is_started = process_group.is_started()
        if job is None and not is_started:
            return False
        ours = process_group.start(None if is_started and given == (None,) * 3 else job)
        if self._meetings is not None:
            return False
        self._meetings = Meetings(self.rank, self.world_size)
        # After the watch has stopped: it is registered later.
        atexit.register(process_group.stop, ours)
        FailureWatch.start()
        return True

    @property
    def rank(self) -> int:
        """The rank of this process."""
        return process_group.rank()

    @property
    def world_size(self) -> int:
        """The number of processes."""
        return process_group.world_size()

    @property
    def device_type(self) -> str:
        """What tensors live on here: "cpu" or "cuda"."""
        return process_group.device_type()

    def gather(self, fact: Any) -> list[Any]:
        """`fact` of every process, in rank order."""
        return process_group.gather(fact)

    def meet(self, what: str) -> None:
        """Go on when every process has come to `what`."""
        if self._meetings is not None and self.world_size > 1:
            self._meetings.meet(what)
