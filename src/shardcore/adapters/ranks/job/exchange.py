"""The exchange: values of all ranks, through the store of the process group, in one order (ADR 33).

A collective of tensors that meets another one on a peer ends the process in C++, or waits for
minutes. Here each value has a number and the name of the call that sends it. Ranks that are at
different calls find out in Python, and the process group has no part in it.
"""

import inspect
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from attrs import evolve

from shardcore.adapters.ranks.job import process_group, signed_store
from shardcore.adapters.ranks.job.rounds import Message, Round
from shardcore.adapters.ranks.job.signed_store import SignedStore
from shardcore.domain.errors import CallProblem, RankMismatchError, ShardcoreError, mark_shared
from shardcore.reporting.errors import say, user_line

# The seconds after which a rank says for whom it waits.
REPORT_SECONDS = 30.0
_PREFIX = "shardcore/exchange"
# The statuses of a rank that has ended in order, and of rank 0 if the store does not answer.
ENDED = "has ended"
LOST = "has ended or was killed (out of memory?): its store does not answer"
# The seconds that a rank waits for others that wait elsewhere: a moment later they may come.
_ELSEWHERE_SECONDS = 5.0
# The seconds for which others leave work to rank 0: its host is where people look for a file.
_RANK_0_SECONDS = 1.0
# The longest sleep between two looks for the values of the others.
_SLEEP_SECONDS = 0.01
# The seconds between two looks at the ranks that are missing: of up to 100 ranks, and the most.
_ASK_SECONDS = 0.5
_MOST_ASK_SECONDS = 5.0
# Of the missing ranks that work, the most whose statuses a rank asks for.
_MOST_AT_WORK = 16

_T = TypeVar("_T")

TOGETHER = (
    "All ranks compute and read sharded values together: make the call on every rank, not under "
    "`if rank == 0`; print or write its result on one."
)


def share_secret() -> None:
    """Shares the secret with which the ranks sign their values. All call it together, first.

    Raises:
        RankMismatchError: If a rank does not come within `SHARDCORE_TIMEOUT`.
    """
    if not process_group.has_others() or signed_store.has_secret():
        return
    message = Message("the start of the job", user_line(inspect.currentframe()), None)
    unsigned = SignedStore(_plain_store(), b"")  # it is asked who has come, and nothing more
    try:
        _meet(message, b"", unsigned)
    except ShardcoreError:
        raise
    except RuntimeError as error:
        raise _lost(message, {0: LOST}) from error
    signed_store.share_secret()


def gather(value: _T, what: str = "a comparison of values") -> list[_T]:
    """Collects the value of every rank, in the order of ranks. All ranks call it together.

    Args:
        value: A value that can be pickled, of any size.
        what: The call that needs it, for the error: "fit() of model 'net'".

    Raises:
        ArgumentProblem: On all ranks, if the value of one cannot be pickled.
        CallProblem: If called outside the main thread.
        RankMismatchError: If a rank is at another call, has ended, waits in a collective of
            tensors, or does not come within `SHARDCORE_TIMEOUT`.
        Exception: The value of a rank that is at another call, if it is an error.
    """
    _check_thread()
    if not process_group.has_others():
        return [value] * process_group.world_size()
    message = Message(what, user_line(inspect.currentframe()), value)
    try:
        messages = _exchange(message)
    except ShardcoreError:
        raise
    except RuntimeError as error:  # torch's for a lost store
        raise _lost(message, {0: LOST}) from error
    own = messages[process_group.rank()]
    for rank, other in enumerate(messages):
        if other.what != own.what:
            _raise_first(value, messages)
            where = f"rank {rank} is at {other.what} ({other.line})"
            raise RankMismatchError(f"{_at(own)}, but {where}. {TOGETHER}")
    return [other.value for other in messages]


def _raise_first(own: object, messages: list[Message]) -> None:
    """Raises the error that a rank has sent, if one has: the ranks diverged because of it."""
    errors = [message.value for message in messages if isinstance(message.value, Exception)]
    if errors:
        raise mark_shared(own if isinstance(own, Exception) else errors[0])


def do_once(work: Callable[[], _T], what: str) -> _T:
    """Does `work` on one of the ranks that come; returns its result on each of them.

    It is rank 0, or the first that comes if rank 0 does not within a second. Ranks come to the
    same work if they have exchanged equally many values, and since then have come to `what`
    equally often.

    Args:
        work: The work; its result can be pickled.
        what: Its name: "save '/tmp/a.keras'".

    Raises:
        ArgumentProblem: On all ranks, if the result cannot be pickled.
        RankMismatchError: If the rank that does it does not end within `SHARDCORE_TIMEOUT`.
    """
    if not process_group.has_others():
        return work()
    own, shared = process_group.rank(), store()
    name = f"work/{shared.store.add(f'count/{own}', 0)}/{what}"
    name = f"{name}/{shared.store.add(f'{name}/times/{own}', 1)}"
    begun = time.monotonic()
    while own and not shared.store.check([name]) and time.monotonic() < begun + _RANK_0_SECONDS:
        time.sleep(_SLEEP_SECONDS)
    first = int(shared.claim(name, str(own).encode()))
    key = f"{name}/result"
    message = Message(what, user_line(inspect.currentframe()), None)
    if first == own:
        message = evolve(message, value=work())
        packed = message.pack(own)
        shared.set(key, packed)
    else:

        def reports() -> bool:
            return shared.claim(f"{name}/reports", str(own).encode()) == str(own).encode()

        _wait(lambda: shared.store.check([key]), lambda: iter([first]), reports, message, shared)
        (packed,) = shared.get([key])
    done = message.unpack(packed, first)
    result: _T = message.value if first == own else done.value
    return result


def is_main_thread() -> bool:
    """Tells whether this is the thread whose calls have one order on all ranks.

    Collectives of two threads interleave in another order on each rank: a deadlock.
    """
    return threading.current_thread() is threading.main_thread()


def _check_thread() -> None:
    if not is_main_thread():
        raise CallProblem(
            "Expected values to be gathered on the main thread, but it was on thread "
            f"{threading.current_thread().name!r}. Do it before handing work to a thread."
        )


def publish_status(shared: SignedStore, status: str) -> None:
    """Publishes the status of this rank, as a predicate: "has ended"; empty while it works."""
    shared.set(f"place/{process_group.rank()}", status.encode())


def store_for_thread(prefix: str = _PREFIX) -> SignedStore:
    """Opens a separate connection to the store, for another thread; see `publish_status`."""
    return SignedStore(process_group.store_for_thread(prefix), signed_store.secret())


def statuses(shared: SignedStore | None = None) -> dict[int, str]:
    """Reads the statuses that other ranks have published; another thread gives its store."""
    ranks = set(range(process_group.world_size())) - {process_group.rank()}
    try:
        shared = shared or store()
        return {rank: status for rank in sorted(ranks) if (status := _status_of(shared, rank))}
    except RuntimeError:
        return {0: LOST}


def store() -> SignedStore:
    """Opens the store on the connection of the main thread, which never waits on it."""
    return SignedStore(_plain_store(), signed_store.secret())


def _plain_store() -> Any:
    import torch.distributed as dist
    from torch.distributed.distributed_c10d import PrefixStore

    group: Any = dist.group.WORLD  # the stubs of torch lack the store
    return PrefixStore(_PREFIX, group.get_group_store())


def _exchange(message: Message) -> list[Message]:
    packed = _meet(message, message.pack(process_group.rank()), store()).values()
    if sum(map(len, set(packed))) > signed_store.PIECE // 2:
        # All have read them then, and no rank keeps their pieces.
        _meet(message, b"", store(), is_after_large=True)
    senders = {value: packed.index(value) for value in set(packed)}
    messages = {value: message.unpack(value, rank) for value, rank in senders.items()}
    return [messages[value] for value in packed]


def _meet(
    message: Message, value: bytes, shared: SignedStore, *, is_after_large: bool = False
) -> Round:
    """Publishes the value of this rank; returns the round, once all ranks have come.

    The round before is removed, with its pieces if it was large.
    """
    here = Round.following(process_group.rank(), process_group.world_size(), shared)
    here.publish(value)

    def missing() -> Iterator[int]:
        ranks = here.missing()
        first = next(ranks, None)
        if first is None:  # the rank that came last has ended before it joined the values
            here.join()
            return
        yield first
        yield from ranks

    _wait(here.is_complete, missing, lambda: here.first() == here.rank, message, shared)
    if here.number > 1:
        evolve(here, number=here.number - 1).forget(has_pieces=is_after_large)
    return here


def _wait(
    is_done: Callable[[], bool],
    missing: Callable[[], Iterator[int]],
    reports: Callable[[], bool],
    message: Message,
    shared: SignedStore,
) -> None:
    """Waits until `is_done`, unless a rank that is missing does not come.

    Args:
        is_done: Returns whether all have come.
        missing: Returns the ranks that have not.
        reports: Returns whether this rank, of all that wait, reports for whom they wait.
        message: The message of this rank, which says where it is.
        shared: The store.
    """
    most = process_group.seconds(None)
    between = min(_MOST_ASK_SECONDS, _ASK_SECONDS * max(1.0, process_group.world_size() / 100))
    begun, next_ask, next_report = time.monotonic(), between, REPORT_SECONDS
    while not is_done():
        waited = time.monotonic() - begun
        if waited >= min(next_ask, most):
            next_ask = waited + between
            _check_missing(missing, waited, most, message, shared)
            if waited >= next_report:
                next_report = most
                if reports():
                    ranks = ", ".join(map(str, missing()))
                    say(f"{_at(message)}, and has waited {waited:.0f} seconds for rank {ranks}\n")
        time.sleep(min(_SLEEP_SECONDS, waited / 10))


def _check_missing(
    missing: Callable[[], Iterator[int]],
    waited: float,
    most: float,
    message: Message,
    shared: SignedStore,
) -> None:
    statuses: dict[int, str] = {}
    for rank in missing():
        statuses[rank] = _status_of(shared, rank)
        if list(statuses.values()).count("") == _MOST_AT_WORK:  # the others are asked later
            break
    ended = {rank: status for rank, status in statuses.items() if status == ENDED}
    if ended:
        raise _lost(message, ended)
    if statuses and waited >= min(most, _ELSEWHERE_SECONDS) and all(statuses.values()):
        raise _lost(message, statuses)
    if statuses and waited >= most:
        late = f"did not come within {most:.0f} seconds"
        raise _lost(message, {rank: statuses.get(rank) or late for rank in missing()})


def _status_of(shared: SignedStore, rank: int) -> str:
    return (shared.find(f"place/{rank}") or b"").decode()


def _lost(message: Message, statuses: dict[int, str]) -> RankMismatchError:
    where = "; ".join(f"rank {rank}, which {status}" for rank, status in statuses.items())
    remedy = "" if LOST in statuses.values() else f" {TOGETHER}"
    return RankMismatchError(f"{_at(message)} and waits for {where}.{remedy}", waited_in_vain=True)


def _at(message: Message) -> str:
    return f"Rank {process_group.rank()} is at {message.what} ({message.line})"
