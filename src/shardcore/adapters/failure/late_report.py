"""The line about ranks that do not come for long, which one of the waiting ranks writes."""

import threading

from shardcore.adapters.failure import heartbeats
from shardcore.adapters.failure.neighbours import Neighbours
from shardcore.adapters.failure.place import Here
from shardcore.adapters.job import exchange
from shardcore.reporting.errors import say


def start(here: Here, neighbours: Neighbours) -> None:
    """Looks for whom this rank waits, and says it if no lower rank does: on another thread.

    Without heartbeats for as long, this rank would seem stopped.
    """
    threading.Thread(
        target=_report, args=(here, neighbours), name="shardcore-report", daemon=True
    ).start()


def _report(here: Here, neighbours: Neighbours) -> None:
    rank = neighbours.rank
    # Mostly these alone are asked for: all ranks of a large job may come here at once.
    before = sorted({0, *neighbours.lower()} - {rank})
    seen = heartbeats.look_in_time(exchange.store_for_thread, before) if before else None
    if seen and seen.waiting():
        return
    seen = heartbeats.look_in_time(exchange.store_for_thread, heartbeats.others())
    # If the store does not answer, the thread that looks for failures says so.
    if seen is not None and min(seen.waiting(), default=rank) >= rank:
        waited = f"has waited {here.seconds:.0f} seconds in a collective"
        say(f"[rank {rank}] {waited} ({here.line}) for {seen.late()}\n")
