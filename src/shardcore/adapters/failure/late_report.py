"""The report about late ranks, which one of the waiting ranks writes."""

import threading

from shardcore.adapters.failure import heartbeats
from shardcore.adapters.failure.main_thread import ThreadState
from shardcore.adapters.failure.neighbours import Neighbours
from shardcore.adapters.job import exchange
from shardcore.reporting.errors import say


def start(state: ThreadState, neighbours: Neighbours) -> None:
    """Reports for whom this rank waits, if no lower rank does: on another thread.

    Without heartbeats for as long, this rank would seem stopped.
    """
    threading.Thread(
        target=_report, args=(state, neighbours), name="shardcore-report", daemon=True
    ).start()


def _report(state: ThreadState, neighbours: Neighbours) -> None:
    rank = neighbours.rank
    # Mostly these alone are asked for: all ranks of a large job may come here at once.
    before = sorted({0, *neighbours.lower()} - {rank})
    seen = heartbeats.look_with_timeout(exchange.store_for_thread, before) if before else None
    if seen and seen.waiting():
        return
    seen = heartbeats.look_with_timeout(exchange.store_for_thread, heartbeats.others())
    # If the store does not answer, the thread that looks for failures says so.
    if seen is not None and min(seen.waiting(), default=rank) >= rank:
        waited = f"has waited {state.seconds:.0f} seconds in a collective"
        say(f"[rank {rank}] {waited} ({state.line}) for {seen.late()}\n")
