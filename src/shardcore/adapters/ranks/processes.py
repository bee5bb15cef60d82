"""The port `Processes` by `torch.distributed`: a job is joined once, and watched from then on."""

import atexit
import os
import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from typing import Any, TypeVar

import attrs
import torch
import torch.distributed as dist

from shardcore.adapters.ranks.failure.watch import FailureWatch
from shardcore.adapters.ranks.job import cores, devices, exchange, process_group
from shardcore.domain.errors import EnvironmentProblem, RankMismatchError, ShardcoreError, text_of
from shardcore.domain.ranks.job import launched_job, resolve_job

_T = TypeVar("_T")

SIGTERM_VARIABLE = "SHARDCORE_SIGTERM_TIMEOUT"
_SAVING_SECONDS = 30.0
# The seconds until the end of a batch, if nothing is saved there: then the program goes no further.
_BATCH_SECONDS = 2.0


@attrs.define
class TorchProcesses:
    """The job of this process.

    Its process group outlives an uninstall: torch cannot join a job twice.
    """

    _has_joined: bool = attrs.field(default=False, init=False)
    _watch: FailureWatch | None = attrs.field(default=None, init=False)
    _hosts: tuple[str, ...] = attrs.field(default=(), init=False)

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
        self._hosts = cores.divide()
        return True

    def take_device(self) -> None:
        """Makes the CUDA device of this rank the current one, before the first tensor is made.

        The rank is that of the launcher's variables; joining the job takes the device too.
        """
        if process_group.is_started():  # its program has taken a device
            return
        job = launched_job(os.environ)
        if job is not None:
            with suppress(EnvironmentProblem):  # which joining shows
                devices.take_device(job)

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
    def hosts(self) -> tuple[str, ...]:
        """The name of the host of each process, in rank order; empty before it has joined."""
        alone = (socket.gethostname(),) * self.world_size
        return self._hosts if process_group.has_others() else alone

    @property
    def launched(self) -> int:
        """The number of processes that the launcher started, also before they join the job."""
        if process_group.is_started():
            return self.world_size
        job = launched_job(os.environ)
        return 1 if job is None else job.world_size

    @property
    def has_others(self) -> bool:
        """Whether other processes work with this one; simulated ranks do not."""
        return process_group.has_others()

    @property
    def device_type(self) -> str:
        """The device type of tensors in this process: "cpu", "cuda", "mps" or "xpu"."""
        return devices.device_type()

    def gather(self, fact: object, what: str = "a comparison of values") -> list[Any]:
        """Collects `fact` of every process, in rank order; `what` is the call that needs it."""
        return exchange.gather(fact, what)

    def barrier(self, what: str) -> None:
        """Waits until every process has called this with `what`.

        Raises:
            RankMismatchError: If a process is at another call, has ended, waits in a collective
                of tensors, or did not come within `SHARDCORE_TIMEOUT`.
        """
        exchange.gather(None, what)

    def send_bytes(self, data: memoryview, source: int, others: Sequence[int]) -> None:
        """Copies `data` of process `source` into that of the `others`. These processes call it."""
        if not data or not process_group.has_others():
            return
        values = torch.frombuffer(data, dtype=torch.uint8)
        # A group of the user may have no backend for tensors on the CPU.
        part = values if "cpu:" in dist.get_backend_config() else values.to(self.device_type)
        if self.rank == source:
            for sending in [dist.isend(part, other) for other in others]:
                assert sending is not None  # this process is in the group
                sending.wait()
        else:
            dist.recv(part, source)
            values.copy_(part)

    def do_once(self, work: Callable[[], _T], what: str) -> _T:
        """Does `work` on one of the processes that come; returns its result on each of them."""
        return exchange.do_once(work, what)

    @contextmanager
    def collective_call(self, what: str) -> Iterator[None]:
        """Runs the call `what`, which all processes make.

        Raises:
            RankMismatchError: As `barrier` does; or if the call failed because a process has ended.
        """
        self.barrier(what)
        try:
            yield
        except SystemExit as error:
            if error.code and self._watch is not None:
                self._watch.exits(error.code)
            raise
        except RuntimeError as error:
            if isinstance(error, ShardcoreError) or not _is_of_peers(error):
                raise
            statuses = exchange.statuses()
            ended = [rank for rank, status in statuses.items() if status == exchange.ENDED]
            if exchange.LOST in statuses.values():
                where = f"rank 0 {exchange.LOST}."
            elif ended:
                where = f"rank {', '.join(map(str, ended))} has ended. {exchange.TOGETHER}"
            else:
                raise
            raise RankMismatchError(f"Rank {self.rank} is in {what}, and {where}") from error

    def report_cell_error(self, error: BaseException | None) -> None:
        """Tells the others with which error a notebook's cell ended here; None for none."""
        if self._watch is not None:
            self._watch.cell.note(error)

    def points(self, saves: bool) -> AbstractContextManager[None]:
        """Opens a part of the program in which all processes pass the same points.

        Args:
            saves: Whether they save at the point at which they end after SIGTERM: they have
                `SHARDCORE_SIGTERM_TIMEOUT` seconds until then.
        """
        if self._watch is None:
            return nullcontext()
        saving = process_group.set_seconds(SIGTERM_VARIABLE, _SAVING_SECONDS)
        return self._watch.termination.points(saving if saves else _BATCH_SECONDS)

    def pass_point(self, save: Callable[[], None]) -> None:
        """Passes such a point; if SIGTERM came to a process, all call `save` at one, and end.

        Raises:
            OtherRankFailed: There.
        """
        if self._watch is not None:
            self._watch.termination.pass_point(save)


def _is_of_peers(error: RuntimeError) -> bool:
    # What gloo raises in the middle of a collective is a plain RuntimeError.
    return isinstance(error, dist.DistError) or "gloo" in text_of(error).lower()
