"""Heartbeats: once a second each rank that runs writes into the store where it is (ADR 37).

A rank that waits in a collective cannot see who is late. The heartbeats show it.
"""

import json
import threading
import time
from collections.abc import Callable, Sequence

from attrs import asdict

from shardcore.adapters.ranks.failure.main_thread import ThreadState
from shardcore.adapters.ranks.failure.neighbours import Neighbours
from shardcore.adapters.ranks.failure.store import describe_host, within
from shardcore.adapters.ranks.job import exchange, process_group
from shardcore.adapters.ranks.job.signed_store import SignedStore
from shardcore.domain.errors import RankMismatchError, ShardcoreError, text_of
from shardcore.domain.ranks.heartbeats import Heartbeat, Observation, name_ended_ranks
from shardcore.reporting.errors import say, user_line_in

# A rank without a heartbeat for so many seconds does not answer; a busy machine may delay one.
_SILENT_SECONDS = 4.0
_LOOK_SECONDS = 0.5
# The most seconds that a store may take.
_STORE_SECONDS = 2 * _SILENT_SECONDS

# In errors of gloo: it has waited for a rank, or that has ended, also since it waited in vain.
_IN_VAIN = ("timed out", "closed by peer", "reset by peer", "broken pipe")


def send(store: SignedStore, number: int, state: ThreadState) -> None:
    """Writes where this rank is into the store, as its heartbeat `number`."""
    beat = Heartbeat(number, state.waits, state.line)
    store.set(f"heartbeat/{process_group.rank()}", json.dumps(asdict(beat)).encode())


def look(
    store: SignedStore, ranks: Sequence[int], is_enough: Callable[[], bool] = lambda: False
) -> Observation:
    """Looks at the heartbeats of ranks for a few seconds, less if no more is to be seen."""
    between = min(_SILENT_SECONDS, _LOOK_SECONDS * max(1.0, len(ranks) / 100))
    before = _last_heartbeats(store, ranks)
    statuses = store.find_all([f"place/{rank}" for rank in ranks])
    by_rank = zip(ranks, statuses, strict=True)
    ended = tuple(rank for rank, status in by_rank if status == exchange.ENDED.encode())
    after, begun = dict(before), time.monotonic()
    while not ended and (
        time.monotonic() < begun + _SILENT_SECONDS
        and any(before[rank] == after[rank] for rank in ranks)
        and not is_enough()
    ):
        time.sleep(between)
        if not is_enough():  # then the store may be gone
            after = _last_heartbeats(store, ranks)
    return Observation(before, after, ended)


def _look_with_timeout(
    connect: Callable[[], SignedStore],
    ranks: Sequence[int],
    is_enough: Callable[[], bool] = lambda: False,
) -> Observation | None:
    return within(_STORE_SECONDS, lambda: look(connect(), ranks, is_enough))


def describe_awaited(connect: Callable[[], SignedStore]) -> str:
    """Describes for whom the ranks wait, also if the store of `connect` does not answer."""
    seen = _look_with_timeout(connect, others())
    return f"{describe_host()} which does not answer" if seen is None else seen.late()


def others() -> list[int]:
    """Lists all ranks but this one."""
    return [rank for rank in range(process_group.world_size()) if rank != process_group.rank()]


def waited_in_graph() -> RankMismatchError:
    """Builds the error of this rank, whose CUDA graph has waited for others until the timeout.

    Ranks that wait for a GPU are in no collective of torch, so it is not known who is late.
    """
    seen = _look_with_timeout(exchange.store_for_thread, others())
    places = seen.lines() if seen else f"{describe_host()} does not answer"
    return RankMismatchError(
        f"Rank {process_group.rank()} waited {process_group.seconds(None):.0f} seconds in a CUDA "
        f"graph with collectives, in which not all ranks took part ({places}). All ranks run the "
        f"same steps. If one computes for so long, set {process_group.TIMEOUT_VARIABLE} to more "
        "seconds."
    )


def unmatched(
    error: BaseException, ended: Sequence[int] = (), is_enough: Callable[[], bool] = lambda: False
) -> str:
    """Describes for whom this rank waited in vain in a collective, as a predicate; or nothing.

    Args:
        error: An error; of any but gloo's, and those of shardcore, it is known what happened.
        ended: The ranks that are known to have ended in order.
        is_enough: Returns whether the answer is of no use any more.
    """
    text = text_of(error).lower()
    if isinstance(error, ShardcoreError) or not isinstance(error, RuntimeError):
        return ""
    if "gloo" not in text or process_group.is_simulated():
        return ""
    where = name_ended_ranks(ended)
    if not where and not is_enough() and any(phrase in text for phrase in _IN_VAIN):
        seen = _look_with_timeout(exchange.store_for_thread, others(), is_enough)
        where = seen.late() if seen else ""
    if not where:
        return ""
    return (
        f"waited in a collective ({user_line_in(error)}) for {where}. All ranks start the same "
        "collectives, in the same order."
    )


def _last_heartbeats(store: SignedStore, ranks: Sequence[int]) -> dict[int, Heartbeat | None]:
    texts = store.find_all([f"heartbeat/{rank}" for rank in ranks])
    beats = (None if text is None else Heartbeat(**json.loads(text)) for text in texts)
    return dict(zip(ranks, beats, strict=True))


def report_late_ranks(state: ThreadState, neighbours: Neighbours) -> None:
    """Reports for whom this rank waits, if no lower rank does: on another thread.

    Without heartbeats for as long, this rank would seem stopped.
    """
    threading.Thread(
        target=_report_late_ranks, args=(state, neighbours), name="shardcore-report", daemon=True
    ).start()


def _report_late_ranks(state: ThreadState, neighbours: Neighbours) -> None:
    rank = neighbours.rank
    # Mostly these alone are asked for: all ranks of a large job may come here at once.
    before = sorted({0, *neighbours.lower()} - {rank})
    seen = _look_with_timeout(exchange.store_for_thread, before) if before else None
    if seen and seen.waiting():
        return
    seen = _look_with_timeout(exchange.store_for_thread, others())
    # If the store does not answer, the thread that looks for failures says so.
    if seen is not None and min(seen.waiting(), default=rank) >= rank:
        waited = f"has waited {state.seconds:.0f} seconds in a collective"
        say(f"[rank {rank}] {waited} ({state.line}) for {seen.late()}\n")
