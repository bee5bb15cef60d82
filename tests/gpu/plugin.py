"""A plug-in of pytest: ranks that are more than the GPUs of this machine share them, over gloo.

NCCL refuses two ranks on one device. With one GPU a test of one rank runs over NCCL, and a test of
several over gloo. With several GPUs a test of as many ranks runs over NCCL.
"""

import torch

from shardcore.adapters.job import process_group
from shardcore.domain.job import Job


def backend(job: Job) -> str:
    """Returns the backends of the job's group, and binds this rank to its CUDA device."""
    count = torch.cuda.device_count()
    torch.cuda.set_device(job.local_rank % count)
    return "cpu:gloo,cuda:nccl" if job.world_size <= count else "gloo"


def pytest_configure() -> None:
    """Replaces the choice of shardcore, which refuses to share a device."""
    process_group._backend = backend
