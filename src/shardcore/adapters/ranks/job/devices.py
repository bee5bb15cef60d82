"""The device of a rank, and the backends of torch.distributed that move its tensors."""

import os

import attrs
import torch

from shardcore.adapters import switches
from shardcore.domain.errors import EnvironmentProblem
from shardcore.domain.ranks.job import Job

SHARE_VARIABLE = "SHARDCORE_SHARE_GPUS"
# NCCL 2.30 and newer: "1" lets several ranks use one GPU.
NCCL_SHARES_VARIABLE = "NCCL_MULTI_RANK_GPU_ENABLE"

# The accelerators that Keras uses on torch, and the devices on which several ranks compute.
_ACCELERATORS = ("cuda", "mps", "xpu")
_SEVERAL_RANKS = ("cpu", "cuda")


@attrs.frozen
class CudaDevices:
    """The CUDA devices that this process sees, in their order.

    Args:
        names: Their names in CUDA.
        memory: Their bytes of memory.
    """

    names: tuple[str, ...]
    memory: tuple[int, ...]


def cuda_devices() -> CudaDevices:
    """Lists the CUDA devices that this process sees; none where it computes on another kind."""
    count = torch.cuda.device_count() if device_type() == "cuda" else 0
    properties = [torch.cuda.get_device_properties(number) for number in range(count)]
    names, memory = ([getattr(p, field) for p in properties] for field in ("name", "total_memory"))
    return CudaDevices(tuple(names), tuple(memory))


def device_type() -> str:
    """Finds the type of the device on which Keras computes: "cpu", "cuda", "mps" or "xpu".

    It is that of `KERAS_TORCH_DEVICE`, else of the accelerator that torch sees, else "cpu".
    """
    wanted = os.environ.get("KERAS_TORCH_DEVICE", "").partition(":")[0]
    seen = torch.accelerator.current_accelerator(check_available=True)
    return wanted or (seen.type if seen is not None and seen.type in _ACCELERATORS else "cpu")


def take_device(job: Job) -> None:
    """Makes the CUDA device of the local rank the current one, if Keras computes on CUDA.

    Raises:
        EnvironmentProblem: If this host has no device for the local rank, or if
            `SHARDCORE_SHARE_GPUS` is neither "1" nor "0".
    """
    if device_type() != "cuda":
        return
    count = torch.cuda.device_count()
    if job.local_rank >= count and not _shares_devices(job):
        raise EnvironmentProblem(
            f"Expected a CUDA device for local rank {job.local_rank} (rank {job.rank}), but "
            f"this host shows {count}. Start at most that many processes "
            "on this host, hide the devices with CUDA_VISIBLE_DEVICES='' to use the CPU, or set "
            f"{SHARE_VARIABLE}=1 to try a program of more ranks than devices: they share them."
        )
    torch.cuda.set_device(job.local_rank % count)


def backend(job: Job) -> str:
    """Chooses the backends of the job's group, and binds this rank to its CUDA device."""
    check_shared(job.world_size)
    take_device(job)
    nccl_serves = not _shares_devices(job) or os.environ.get(NCCL_SHARES_VARIABLE) == "1"
    return "cpu:gloo,cuda:nccl" if device_type() == "cuda" and nccl_serves else "gloo"


def check_shared(ranks: int) -> None:
    """Refuses several ranks on a device that serves one.

    Raises:
        EnvironmentProblem: If they would compute on another device than CPU or CUDA.
    """
    device = device_type()
    if ranks > 1 and device not in _SEVERAL_RANKS:
        raise EnvironmentProblem(
            f"Expected the {ranks} ranks of this job to compute on CPUs or CUDA devices, but Keras "
            f"computes on {device!r}, which serves one rank. Start one process, or set "
            "KERAS_TORCH_DEVICE=cpu before Keras is imported.",
            name=device,
        )


def _shares_devices(job: Job) -> bool:
    is_asked = switches.is_on(SHARE_VARIABLE, default=False)
    return is_asked and 0 < torch.cuda.device_count() < job.world_size
