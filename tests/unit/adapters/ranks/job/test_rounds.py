"""Rounds of the exchange over a store in this process, for any number of ranks."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed import HashStore

from shardcore.adapters.ranks.job.rounds import Round
from shardcore.adapters.ranks.job.signed_store import SignedStore
from tests.unit.adapters.ranks.job.counting_store import CountingStore

SECRET = b"drawn by rank 0"


def started(ranks, number=1):
    """The same round, as each rank sees it, and the requests of each rank."""
    store = HashStore()
    counted = [CountingStore(store) for _ in range(ranks)]
    shared = [SignedStore(each, SECRET) for each in counted]
    return [Round(number, rank, ranks, each) for rank, each in enumerate(shared)], counted


@given(
    st.integers(1, 9).flatmap(
        lambda n: st.tuples(
            st.lists(st.binary(max_size=2), min_size=n, max_size=n), st.permutations(range(n))
        )
    )
)
def test_each_rank_reads_the_values_of_all_in_any_order_of_coming(case):
    values, order = case
    rounds, _ = started(len(values))
    for come, rank in enumerate(order):
        assert not rounds[rank].is_complete()
        assert list(rounds[rank].missing()) == sorted(order[come:])
        rounds[rank].publish(values[rank])
    assert all(each.is_complete() and each.values() == values for each in rounds)


@pytest.mark.parametrize("ranks", [2, 64, 4096])
def test_requests_and_bytes_of_a_rank_do_not_grow_with_the_ranks(ranks):
    rounds, counted = started(ranks)
    for each in rounds:
        each.publish(b"all the same" * 10)
    for each in rounds:
        assert each.is_complete()
        each.values()
    *others, last = counted
    for each in others:
        assert each.requests.total() == 4
        assert each.bytes < 250
    assert last.requests.total() <= 7 + ranks
    assert last.bytes < 250 + ranks * 152


def test_a_round_is_joined_though_the_last_rank_has_ended_before():
    rounds, _ = started(3)
    for each in rounds[:2]:
        each.publish(b"value")
    rounds[2].shared.set("1/2", b"value")  # and no more
    assert not rounds[0].is_complete()
    assert list(rounds[0].missing()) == []
    rounds[0].join()
    assert rounds[1].values() == [b"value"] * 3


def test_a_count_that_another_program_raised_completes_no_round():
    rounds, counted = started(3)
    counted[0].store.add("1/count", 5)
    rounds[0].publish(b"value")
    assert not rounds[0].is_complete()
    for each in rounds[1:]:
        each.publish(b"value")
    assert rounds[0].values() == [b"value"] * 3


@pytest.mark.parametrize("gone", [[5], [0, 7], [3, 4, 5]])
def test_missing_ranks_are_found_by_halves(gone):
    ranks = 1024
    rounds, counted = started(ranks)
    for each in rounds:
        if each.rank not in gone:
            each.publish(b"value")
    counted[9].requests.clear()
    assert list(rounds[9].missing()) == gone
    assert counted[9].requests.total() <= len(gone) * 2 * 10 + 1


def test_nothing_of_a_round_is_left():
    store = HashStore()
    shared = SignedStore(store, SECRET)
    ranks = 3
    first, second = ([Round(n, rank, ranks, shared) for rank in range(ranks)] for n in (1, 2))
    for each in (*first, *second):
        each.publish(b"value")
    before = store.num_keys()
    for each in first:
        each.forget()
    assert before - store.num_keys() == ranks + 2
    assert second[0].values() == [b"value"] * ranks
