"""The port `Processes` by `torch.distributed`: a job is joined once, and watched from then on."""

import atexit
import os
import time
from contextlib import suppress
from typing import Any

import attrs

from shardcore.adapters import cores, process_group
from shardcore.adapters.failure import FailureWatch
from shardcore.domain.errors import EnvironmentProblem, RankMismatchError
from shardcore.domain.job import resolve_job

PATIENCE_SECONDS = 60.0
_POLL_SECONDS = 0.02


@attrs.define
class TorchProcesses:
    """The job of this process.

    Its process group outlives an uninstall: torch cannot join a job twice.
    """

    _has_joined: bool = attrs.field(default=False, init=False)
    _meetings: int = attrs.field(default=0, init=False)
    _watch: FailureWatch | None = attrs.field(default=None, init=False)

    def initialize(
        self,
        job_addresses: str | None = None,
        num_processes: int | None = None,
        process_id: int | None = None,
    ) -> bool:
        """Joins the job that the arguments, Keras' variables or torchrun's describe.

        Arguments have precedence over `KERAS_DISTRIBUTION_*`, and these over torchrun's. A
        process group of the user is adopted. Without any of these, there is no job.

        Returns:
            Whether this call joined the job.

        Raises:
            EnvironmentProblem: If the description is incomplete, contradicts itself or the
                existing group, or the other processes did not join.
        """
        given = (job_addresses, num_processes, process_id)
        has_arguments = given != (None, None, None)
        if self._has_joined and not has_arguments:
            return False
        is_started = process_group.is_started()
        # The user's group is asked first: a program that starts it may leave the variables unset.
        job = resolve_job(*given, environ=os.environ) if has_arguments or not is_started else None
        if job is None and not is_started:
            return False
        ours = process_group.start(job)
        if self._has_joined:
            return False
        self._has_joined = True
        # After the watch has stopped: it is registered later.
        atexit.register(process_group.stop, ours)
        self._watch = FailureWatch.start()
        cores.divide()
        return True

    def take_device(self) -> None:
        """Makes the CUDA device of this rank the current one, before the first tensor is made.

        The rank is that of the launcher's variables; joining the job takes the device too.
        """
        if process_group.is_started():  # its program has taken a device
            return
        with suppress(EnvironmentProblem):  # which joining shows
            job = resolve_job(environ=os.environ)
            if job is not None:
                process_group.take_device(job)

    def unwatch(self) -> None:
        """Stops to watch the other processes, and to be watched."""
        if self._watch is not None:
            self._watch.stop()

    @property
    def rank(self) -> int:
        """The rank of this process."""
        return process_group.rank()

    @property
    def world_size(self) -> int:
        """The number of processes."""
        return process_group.world_size()

    @property
    def launched(self) -> int:
        """The number of processes that the launcher started, also before they join the job."""
        if process_group.is_started():
            return self.world_size
        with suppress(EnvironmentProblem):  # which joining shows; a process alone needs no job
            job = resolve_job(environ=os.environ)
            return 1 if job is None else job.world_size
        return 1

    @property
    def has_others(self) -> bool:
        """Whether other processes work with this one; simulated ranks do not."""
        return self.world_size > 1 and not process_group.is_simulated()

    @property
    def device_type(self) -> str:
        """The device type of tensors in this process: "cpu", "cuda", "mps" or "xpu"."""
        return process_group.device_type()

    def gather(self, fact: object) -> list[Any]:
        """Returns `fact` of every process, in rank order."""
        return process_group.gather(fact)

    def meet(self, what: str) -> None:
        """Waits until every process has called this with `what`.

        A barrier would wait for ever for a missing rank, and would match another collective of
        that rank. The store of the job distinguishes the two.

        Raises:
            RankMismatchError: If a process did not within a minute, or `SHARDCORE_TIMEOUT` if that
                is shorter, or gave another `what`.
        """
        if not self._has_joined or self.world_size == 1:
            return
        self._meetings += 1
        store = process_group.store_for_thread(f"shardcore/meeting/{self._meetings}")
        store.set(str(self.rank), what)
        patience = min(PATIENCE_SECONDS, process_group.seconds(None))
        deadline = time.monotonic() + patience
        others = [str(rank) for rank in range(self.world_size)]
        while not store.check(others):
            if time.monotonic() > deadline:
                missing = ", ".join(rank for rank in others if not store.check([rank]))
                raise RankMismatchError(
                    f"Rank {self.rank} came to {what}, but rank {missing} did not within "
                    f"{patience:.0f} seconds. Sharded values are gathered from all ranks, "
                    "so call it on every rank, not on one: rank 0 writes the file."
                )
            time.sleep(_POLL_SECONDS)
        for rank in others:
            found = store.get(rank).decode()
            if found != what:
                raise RankMismatchError(
                    f"Rank {self.rank} came to {what}, rank {rank} to {found}: every rank must "
                    "make the same calls in the same order."
                )
