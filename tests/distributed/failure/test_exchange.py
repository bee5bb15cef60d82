"""Values and work through the store of the process group."""

import hashlib
import os
import threading
import time

import pytest

from shardcore.adapters.ranks.job import exchange, process_group
from shardcore.domain.errors import ArgumentProblem
from shardcore.domain.ranks.job import resolve_job
from shardcore.testing import run_ranks


@pytest.mark.parametrize("late", [0, 1, 2])
def test_work_is_done_once_each_time_and_all_ranks_have_its_result(late):
    def program(rank):
        done = []

        def work():
            done.append(rank)
            return f"of {rank}"

        if rank == late:
            time.sleep(0.2)
        results = [exchange.do_once(work, "save 'a.keras'") for _ in range(3)]
        return done, results

    ranks = run_ranks(program, 3)
    assert sum(len(done) for done, _ in ranks) == 3
    for _, results in ranks:
        assert results == ranks[0][1]


def joined(program, *args):
    """Runs a program on ranks with the store of a job, which takes 8 MiB at a time."""

    def on_rank(rank):
        process_group.start(resolve_job(environ=os.environ))
        exchange.share_secret()
        return program(rank, *args)

    return run_ranks(on_rank, 2, init=False)


@pytest.mark.parametrize("size", [3_000_000, 8_400_000, 60_000_000])
def test_a_value_of_any_size_reaches_all_ranks_and_leaves_nothing(size):
    def program(rank):
        keys = []
        for _ in range(2):
            values = exchange.gather(os.urandom(size) if rank else b"small", "agree()")
            digest = hashlib.sha256(values[1]).hexdigest()
            assert (values[0], len(values[1])) == (b"small", size)
            exchange.gather(None)
            time.sleep(0.5)  # all have removed what they left
            keys.append(exchange.store().store.num_keys())
            exchange.gather(None)
        return digest, keys[1] - keys[0]

    (digest, more), (other_digest, more_there) = joined(program)
    assert digest == other_digest
    assert max(more, more_there) <= 2  # of a heartbeat; a value of 8.4 MB comes in three pieces


def test_values_that_are_large_together_reach_all_ranks():
    def program(rank):
        return [len(value) for value in exchange.gather(bytes([rank]) * 5_000_000, "agree()")]

    assert joined(program) == [[5_000_000] * 2] * 2


def test_the_result_of_work_may_be_large():
    assert (
        joined(lambda rank: len(exchange.do_once(lambda: b"x" * 9_000_000, "save")))
        == [9_000_000] * 2
    )


@pytest.mark.parametrize(
    "call",
    [
        lambda rank: exchange.gather(1 if rank else threading.Lock(), "agree()"),
        lambda rank: exchange.do_once(threading.Lock, "agree()"),
    ],
    ids=["gather", "do_once"],
)
def test_a_value_that_cannot_be_pickled_is_named_on_all_ranks(call):
    def program(rank):
        with pytest.raises(ArgumentProblem) as refused:
            call(rank)
        return str(refused.value), refused.value.rank, exchange.gather(rank)

    (text, rank, gathered), second = joined(program)
    assert second == (text, rank, gathered)
    assert text.startswith(
        f"Expected a value that can be pickled for agree(), got one of type 'lock' on rank {rank} "
        "(TypeError: cannot pickle '_thread.lock' object): "
    )
    assert gathered == [0, 1]  # the ranks go on


class Hostile:
    def __reduce__(self):
        return fail_to_read, ()


def fail_to_read():
    raise RuntimeError("it cannot be read")


def test_a_value_that_cannot_be_read_is_named_on_all_ranks():
    """It is no lost store, though that is a RuntimeError too."""

    def program(rank):
        with pytest.raises(ArgumentProblem, match=r"of rank 1.*RuntimeError: it cannot be read"):
            exchange.gather(Hostile() if rank else 1, "agree()")
        return exchange.gather(rank)

    assert joined(program) == [[0, 1]] * 2
