"""The problem of a rank that cannot start, which it tells the others before they connect.

Ranks that connect wait in C++ for one that has failed, until the timeout.
"""

import time
from contextlib import suppress
from datetime import timedelta
from typing import TYPE_CHECKING

from shardcore.domain.job import Job

if TYPE_CHECKING:  # a torch without torch.distributed has no stores
    from torch.distributed.distributed_c10d import Store

# The most time that ranks with a problem give the others to come and read it: the end of a rank
# may end the store.
TELL_LIMIT = timedelta(seconds=30)
_SLEEP_SECONDS = 0.01


def share(problem: str, store: "Store", job: Job, limit: timedelta) -> str:
    """Returns the problem of a rank that has one; empty once all ranks are here without.

    Args:
        problem: That of this rank, or nothing.
        store: The store of this start of the job.
        job: The rank and its job.
        limit: The most time to wait for the others.

    Raises:
        DistError: If not all ranks come, and none has a problem.
    """
    if problem or store.add("ready", 1) == job.world_size:
        store.set("start", problem)
    store.wait(["start"], limit)
    text = store.get("start").decode(errors="replace")
    if text:
        with suppress(RuntimeError):  # the store has ended with another rank
            _wait_for_others(store, job)
    # It is not signed: there is no secret yet.
    return "".join(character for character in text if character.isprintable())


def _wait_for_others(store: "Store", job: Job) -> None:
    deadline = time.monotonic() + TELL_LIMIT.total_seconds()
    store.add("read", 1)
    while store.add("read", 0) < job.world_size and time.monotonic() < deadline:
        time.sleep(_SLEEP_SECONDS)
