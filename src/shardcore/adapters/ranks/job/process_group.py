"""The process group of `torch.distributed`: one process per device, joined once.

gloo on CPU. On CUDA NCCL moves tensors, and gloo small host objects; ranks that share a device use
gloo alone, unless the user lets NCCL share it. Launch and rendezvous are those of torch; rank 0
opens the socket of its store (`rendezvous.open_store`). This module gives torch no `device_id`: a
group that is bound to a device has subgroups only if all ranks create each of them.
"""

import os
import threading
import time
from datetime import timedelta
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from shardcore.adapters.ranks.job import devices, rendezvous
from shardcore.adapters.torch_private import collectives
from shardcore.domain.errors import EnvironmentProblem
from shardcore.domain.ranks.job import Job
from shardcore.reporting.errors import waiting

if TYPE_CHECKING:  # a torch without torch.distributed has no stores
    from torch.distributed.distributed_c10d import Store

TIMEOUT_VARIABLE = "SHARDCORE_TIMEOUT"
DEFAULT_TIMEOUT = 600.0

# The threads on which gloo runs collectives; the seconds to wait, in all and between two checks.
_WORKER = "pt_gloo_runloop"
_PUT_AWAY_SECONDS = 10.0
_LOOK_SECONDS = 0.002
# The seconds that torch has for its own error after the timeout.
_ANSWER_SECONDS = 2.0


def start(job: Job | None, timeout: float | None = None, *, init_method: str | None = None) -> bool:
    """Joins the job's group, or adopts the one that the user has already started.

    Args:
        job: The job, with the rank of this process; None for a process alone, without a group.
        timeout: The seconds that a collective may wait for the other ranks; by default the
            environment variable `SHARDCORE_TIMEOUT`, else 600.
        init_method: The rendezvous of the ranks, as a URL for torch; by default `tcp://` with
            the job's address and port.

    Returns:
        Whether the group was started here: `stop` ends no other.

    Raises:
        EnvironmentProblem: If a group of another rank or size exists, if this host has no
            device for the local rank, if several ranks would compute on another device than CPU
            or CUDA, if a rank names a wrong network interface, or if the other ranks did not join.

    Example:
        >>> start(None), rank(), world_size()
        (False, 0, 1)
    """
    was_started = is_started()
    if was_started:
        _check_same(job)
        devices.check_shared(world_size())
    elif job is not None:
        _init(job, seconds(timeout), init_method or _rendezvous_url(job))
    if is_started():
        collectives.gather_safely()
    return is_started() and not was_started


def simulate(ranks: int) -> None:
    """Makes this process rank 0 of simulated ranks, whose collectives return wrong values."""
    if ranks > 1:
        dist.init_process_group("fake", rank=0, world_size=ranks)


def stop(ours: bool) -> None:
    """Ends the group if it was started here; the user's group stays.

    In both cases the last collectives have finished then: the interpreter may exit.
    """
    if world_size() > 1:
        _wait_for_workers()
    if ours and is_started():
        dist.destroy_process_group()


def is_started() -> bool:
    """Tells whether this process has a process group, also one that the user started."""
    return dist.is_available() and dist.is_initialized()


def rank() -> int:
    """Asks torch for the rank of this process; 0 for a single process."""
    return dist.get_rank() if is_started() else 0


def world_size() -> int:
    """Counts the processes of the group; 1 for a single process."""
    return dist.get_world_size() if is_started() else 1


def is_simulated() -> bool:
    """Tells whether this is torch's "fake" group, which has no other ranks."""
    return is_started() and dist.get_backend() == "fake"


def has_others() -> bool:
    """Tells whether other processes work with this one; simulated ranks do not."""
    return world_size() > 1 and not is_simulated()


def store_for_thread(prefix: str) -> "Store":
    """Opens a separate connection to the store of the default group, with keys under `prefix`.

    Another store would need a second address. A wait on a shared connection blocks every other
    thread, so `clone` opens a new one.
    """
    from torch.distributed.distributed_c10d import PrefixStore

    group: Any = dist.group.WORLD  # the stubs of torch lack the store and `clone`
    return PrefixStore(prefix, group.get_group_store().clone())


def single_threaded() -> None:
    """Makes this process compute on one CPU thread, for many ranks on few cores."""
    torch.set_num_threads(1)


def seconds(timeout: float | None) -> float:
    """Chooses the timeout in seconds: the argument, else `SHARDCORE_TIMEOUT`, else 600.

    Example:
        >>> seconds(30)
        30
    """
    return set_seconds(TIMEOUT_VARIABLE, DEFAULT_TIMEOUT) if timeout is None else timeout


def set_seconds(variable: str, default: float) -> float:
    """Reads a number of seconds from an environment variable.

    Raises:
        EnvironmentProblem: If it is no positive number.

    Example:
        >>> set_seconds("NOT_SET", 30.0)
        30.0
    """
    text = os.environ.get(variable, str(default))
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise EnvironmentProblem(
            f"Expected {variable} to be a positive number of seconds, got {text!r}. "
            f"Unset it for {default:.0f} seconds, or set it to a number such as 120.",
            got=repr(text),
        )
    return value


def _init(job: Job, timeout: float, init_method: str) -> None:
    others = "rank 0 and all others" if job.rank else f"the other {job.world_size - 1} of its job"
    with waiting(f"[rank {job.rank}] waits for {others} to meet at {init_method}", timeout):
        _join(job, timeout, init_method)


def _join(job: Job, timeout: float, init_method: str) -> None:
    backend, limit = devices.backend(job), timedelta(seconds=timeout)
    problem = rendezvous.interface_problem(job.rank)
    if problem:
        limit = min(limit, rendezvous.TELL_LIMIT)
    try:
        store = _rendezvous(job, limit, init_method)
        problem = rendezvous.share_problem(problem, store, job, limit)
        if not problem:
            dist.init_process_group(
                backend, store=store, rank=job.rank, world_size=job.world_size, timeout=limit
            )
            return
    except dist.DistError as error:
        if not problem:
            raise EnvironmentProblem(
                f"Rank {job.rank} of {job.world_size} could not join its group at {init_method} "
                f"within {timeout:.0f} seconds: {error}. Check that all {job.world_size} processes "
                "were started, with the same address, and that rank 0's port can be reached and "
                "is free."
            ) from error
    except RuntimeError as error:
        if "gloo" not in str(error).lower():
            raise
        raise EnvironmentProblem(rendezvous.unreachable(error, job.rank)) from error
    raise EnvironmentProblem(problem)


def _rendezvous(job: Job, limit: timedelta, init_method: str) -> "Store":
    """Connects to the store, under the name of this start of the job.

    torch 2.13 waits for ever for a program that took the port, accepts and does not answer. So
    another thread waits, which is left alone then.

    Raises:
        DistError: If nothing answers within `limit`.
    """
    from torch.distributed.distributed_c10d import PrefixStore
    from torch.distributed.rendezvous import rendezvous as torch_rendezvous

    answer: SimpleQueue[Store | Exception] = SimpleQueue()

    def connect() -> None:
        try:
            store = (
                rendezvous.open_store(job, limit) if init_method == _rendezvous_url(job) else None
            )
            if store is None:
                store = next(
                    torch_rendezvous(init_method, job.rank, job.world_size, timeout=limit)
                )[0]
            answer.put(store)
        except Exception as error:  # noqa: BLE001 - raised again on the main thread
            answer.put(error)

    threading.Thread(target=connect, name="shardcore-rendezvous", daemon=True).start()
    try:
        store = answer.get(timeout=limit.total_seconds() + _ANSWER_SECONDS)
    except Empty:
        raise dist.DistStoreError("the port is taken, and no store of torch answers") from None
    if isinstance(store, Exception):
        raise store
    store.set_timeout(limit)
    return PrefixStore(rendezvous.agree_on_name(store, job, limit), store)


def _rendezvous_url(job: Job) -> str:
    host = f"[{job.master_address}]" if ":" in job.master_address else job.master_address
    return f"tcp://{host}:{job.master_port}"


def _check_same(job: Job | None) -> None:
    if job is None:
        return
    actual = (dist.get_rank(), dist.get_world_size())
    if actual != (job.rank, job.world_size):
        raise EnvironmentProblem(
            f"Expected rank {job.rank} of {job.world_size} (from {dict(job.source)}), but the "
            f"process group that is already initialized is rank {actual[0]} of {actual[1]}. Remove "
            "one of the two: do not call init_process_group, or do not give the job."
        )


def _wait_for_workers() -> None:
    """Waits until no thread of gloo has tensors to release.

    torch 2.13 (pytorch issue 190489): the thread that ran a collective releases its tensors a
    moment after the waiting rank continues, and needs the interpreter for it. If the interpreter
    exits meanwhile, the process aborts with "terminate called without an active exception".
    Destroying the groups does not end their threads, which the caches of DTensor hold. The number
    of unfinished works has no public name. A thread that sleeps in two checks has no unfinished
    work, or one for which this rank has not waited and another has not started.
    """
    deadline = time.monotonic() + _PUT_AWAY_SECONDS
    idle = 0
    while idle < 2 and time.monotonic() < deadline:
        # Sleeping releases the interpreter to a thread that waits for it.
        time.sleep(_LOOK_SECONDS)
        # The threads of this process, which Linux shows.
        idle = 0 if any(map(_is_busy, Path("/proc/self/task").glob("*"))) else idle + 1


def _is_busy(task: Path) -> bool:
    try:
        name, _, rest = (task / "stat").read_text().partition("(")[2].rpartition(")")
    except OSError:  # the thread has ended
        return False
    return name == _WORKER and rest.split()[0] != "S"
