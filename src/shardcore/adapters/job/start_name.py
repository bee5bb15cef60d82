"""The name of one start of a job: torchrun's store outlives its ranks, with all their keys.

torch 2.13 keeps one store through all restarts, and gloo would read the addresses of ended ranks.
The count of restarts is no name: the agents of two hosts can differ in it.
"""

import re
import time
from datetime import timedelta
from typing import TYPE_CHECKING
from uuid import uuid4

import torch.distributed as dist

from shardcore.domain.job import Job

if TYPE_CHECKING:  # a torch without torch.distributed has no stores
    from torch.distributed.distributed_c10d import Store

_SLEEP_SECONDS = 0.01


def agree(store: "Store", job: Job, limit: timedelta) -> str:
    """Returns a name that all ranks of this start have, and no earlier start had.

    Each rank asks under a new name, which no ended rank used. Rank 0 answers all that ask,
    also those of an earlier start, until each rank of this one has its answer.

    Raises:
        DistError: If the ranks do not all come within `limit`.
    """
    own = uuid4().hex
    if job.rank == 0:
        _answer(store, own, range(1, job.world_size), limit)
        return own
    store.set(f"asks/{job.rank}", own)
    store.wait([f"answer/{own}"], limit)
    name = _name(store.get(f"answer/{own}"))
    store.set(f"{name}/{job.rank}", "")
    return name


def _answer(store: "Store", name: str, others: range, limit: timedelta) -> None:
    deadline = time.monotonic() + limit.total_seconds()
    while not store.check([f"{name}/{rank}" for rank in others]):
        if time.monotonic() > deadline:
            late = [rank for rank in others if not store.check([f"{name}/{rank}"])]
            raise dist.DistStoreError(f"ranks {late} did not come")
        for rank in others:
            if store.check([f"asks/{rank}"]):
                store.set(f"answer/{_name(store.get(f'asks/{rank}'))}", name)
        time.sleep(_SLEEP_SECONDS)


def _name(found: bytes) -> str:
    if not re.fullmatch(rb"[0-9a-f]{32}", found):
        raise dist.DistStoreError("a name in the store is not of a rank: who else writes there?")
    return found.decode()
