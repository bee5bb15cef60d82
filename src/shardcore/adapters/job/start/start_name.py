"""The name of one start of a job: torchrun's store outlives its ranks, with their keys (ADR 36).

torch 2.13 keeps one store through all restarts, and gloo would read the addresses of ended ranks.
The count of restarts is no name: the agents of two hosts can differ in it.
"""

import re
import time
from datetime import timedelta
from typing import TYPE_CHECKING, Any
from uuid import uuid4

import torch.distributed as dist

from shardcore.adapters.job.store_keys import absent, values
from shardcore.domain.job import Job

if TYPE_CHECKING:  # a torch without torch.distributed has no stores
    from torch.distributed.distributed_c10d import Store

# The seconds between two looks for names: the later, the longer.
_SLEEP_SECONDS = 0.01
_MOST_SLEEP_SECONDS = 0.5


def agree(store: "Store", job: Job, limit: timedelta) -> str:
    """Returns a name that all ranks of this start have, and no earlier start had.

    Each rank asks under a new name, which no ended rank used. Rank 0 answers all that ask,
    also those of an earlier start, until each rank of this one has its answer. Each of its
    looks is one request for all ranks; the other ranks send a fixed number of requests.

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
    begun = time.monotonic()
    asks = [f"asks/{rank}" for rank in others]
    have_answer = [f"{name}/{rank}" for rank in others]
    answered: set[str] = set()
    while not store.check(have_answer):
        waited = time.monotonic() - begun
        if waited > limit.total_seconds():
            late = list(absent(store, asks)) or list(absent(store, have_answer))
            raise dist.DistStoreError(f"ranks {[others[number] for number in late]} did not come")
        if store.check(asks):
            new = set(map(_name, values(store, asks))) - answered
            _write(store, [f"answer/{start}" for start in new], name)
            answered |= new
        time.sleep(min(_MOST_SLEEP_SECONDS, max(_SLEEP_SECONDS, waited / 10)))


def _write(store: Any, keys: list[str], value: str) -> None:
    """Writes one value under all keys, in one request likewise."""
    if keys and store.has_extended_api():
        store.multi_set(keys, [value] * len(keys))
        return
    for key in keys:
        store.set(key, value)


def _name(written: bytes) -> str:
    if not re.fullmatch(rb"[0-9a-f]{32}", written):
        raise dist.DistStoreError("a name in the store is not of a rank: who else writes there?")
    return written.decode()
