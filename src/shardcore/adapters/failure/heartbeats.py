"""Heartbeats: each rank writes into the store once a second where it is; a stopped one does not.

A rank that waits in a collective cannot see who is late. The heartbeats show it.
"""

import json
import threading
import time
from collections.abc import Callable, Sequence
from queue import Empty, SimpleQueue
from typing import TypeVar

from attrs import asdict, frozen

from shardcore.adapters.failure.place import Here
from shardcore.adapters.job import exchange, process_group
from shardcore.adapters.job.signed_store import SignedStore
from shardcore.domain.errors import RankMismatchError, ShardcoreError
from shardcore.reporting.errors import user_line_in

# A rank without a heartbeat for so many seconds does not answer; a busy machine may delay one.
_SILENT_SECONDS = 4.0
_LOOK_SECONDS = 0.5
# The most seconds that a store may take.
_STORE_SECONDS = 2 * _SILENT_SECONDS

_T = TypeVar("_T")


@frozen
class Heartbeat:
    """A heartbeat of a rank.

    Args:
        number: How many came before.
        waits: Whether its main thread waits in a collective of tensors.
        line: The line of the user's code that it runs.
    """

    number: int
    waits: bool
    line: str


def send(store: SignedStore, number: int, here: Here) -> None:
    """Sends a heartbeat of this rank."""
    beat = Heartbeat(number, here.waits, here.line)
    store.set(f"heartbeat/{process_group.rank()}", json.dumps(asdict(beat)).encode())


def late_ranks(store: SignedStore) -> str:
    """Returns the ranks for which the others wait, and where they are. It takes a few seconds."""
    others = [each for each in range(process_group.world_size()) if each != process_group.rank()]
    between = min(_SILENT_SECONDS, _LOOK_SECONDS * max(1.0, len(others) / 100))
    before = _last(store, others)
    after, begun = dict(before), time.monotonic()
    while time.monotonic() < begun + _SILENT_SECONDS and any(
        before[rank] == after[rank] for rank in others
    ):
        time.sleep(between)
        after = _last(store, others)
    found = {
        rank: _where(beat, is_silent=beat == before[rank])
        for rank, beat in after.items()
        if beat is None or beat == before[rank] or not beat.waits
    }
    if found:
        return "; ".join(f"rank {rank}, {where}" for rank, where in found.items())
    # Where they were seen first: one that has failed meanwhile has left the user's code.
    places = "; ".join(f"rank {rank} at {beat.line}" for rank, beat in before.items() if beat)
    return f"no rank: all wait, in different collectives ({places})"


def awaited(connect: Callable[[], SignedStore]) -> str:
    """Returns for whom the others wait, also if the store that `connect` returns is silent."""
    found = within(_STORE_SECONDS, lambda: late_ranks(connect()))
    return found or "the rank that holds the store, or its host, which does not answer"


def timed_out(error: Exception, collective: str) -> RankMismatchError | None:
    """Returns the error of a rank that waited in vain in `collective`; None for another `error`."""
    text = str(error).lower()
    if "gloo" not in text or "timed out" not in text or process_group.is_simulated():
        return None
    return waited_in_vain(collective)


def waited_in_vain(collective: str) -> RankMismatchError:
    """Returns the error of this rank, which has waited in `collective` until the timeout."""
    return RankMismatchError(
        f"Rank {process_group.rank()} waited {process_group.seconds(None):.0f} seconds in "
        f"{collective} for {awaited(exchange.store_for_thread)}. "
        f"If it computes for so long, set {process_group.TIMEOUT_VARIABLE} to more seconds."
    )


def unmatched(error: BaseException, ended: Sequence[int] = ()) -> str:
    """Returns for whom this rank waited in vain in a collective, as a predicate; or nothing.

    Args:
        error: An error; of any but gloo's, and those of shardcore, it is known what happened.
        ended: The ranks that are known to have ended in order.
    """
    text = str(error).lower()
    if isinstance(error, ShardcoreError) or not isinstance(error, RuntimeError):
        return ""
    if "gloo" not in text or process_group.is_simulated():
        return ""
    where = ", ".join(f"rank {each}, which has ended" for each in ended)
    if not where and "timed out" in text:
        where = within(_STORE_SECONDS, lambda: late_ranks(exchange.store_for_thread())) or ""
    if not where:
        return ""
    return (
        f"waited in a collective ({user_line_in(error)}) for {where}. All ranks start the same "
        "collectives, in the same order."
    )


def within(seconds: float, call: Callable[[], _T]) -> _T | None:
    """Returns what `call` returns; None if it fails or takes longer: a store may be stopped.

    Example:
        >>> within(1.0, lambda: 3), within(0.01, lambda: time.sleep(0.1))
        (3, None)
    """
    found: SimpleQueue[_T | None] = SimpleQueue()

    def run() -> None:
        try:
            found.put(call())
        except RuntimeError:  # torch's for a lost store
            found.put(None)

    threading.Thread(target=run, name="shardcore-store", daemon=True).start()
    try:
        return found.get(timeout=seconds)
    except Empty:
        return None


def _last(store: SignedStore, ranks: Sequence[int]) -> dict[int, Heartbeat | None]:
    """Returns the last heartbeat of each rank."""
    found = store.find_all([f"heartbeat/{rank}" for rank in ranks])
    beats = (None if each is None else Heartbeat(**json.loads(each)) for each in found)
    return dict(zip(ranks, beats, strict=True))


def _where(beat: Heartbeat | None, *, is_silent: bool) -> str:
    if beat is None:
        return "which has sent no heartbeat"
    if is_silent:
        return f"which does not answer (last seen at {beat.line}): stopped, or its network stalls"
    return f"which computes ({beat.line})"
