"""The name of a start of a job, over a store in this process, for any number of ranks."""

from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from uuid import uuid4

import pytest
import torch.distributed as dist

from shardcore.adapters.ranks.job.rendezvous import agree_on_name
from shardcore.domain.ranks.job import Job
from tests.unit.adapters.ranks.job.counting_store import CountingStore

LIMIT = timedelta(seconds=10)


def job(rank, ranks):
    return Job(rank, ranks, rank, "127.0.0.1", 1234)


def ask(store, ranks):
    """Asks for the ranks but rank 0, each under a new name."""
    names = {rank: uuid4().hex for rank in range(1, ranks)}
    for rank, name in names.items():
        store.set(f"asks/{rank}", name)
    return names


class WithOthers(CountingStore):
    """A store in which the other ranks take their answers as soon as rank 0 has written them."""

    def __init__(self, store, names):
        super().__init__(store)
        self.names = names

    def multi_set(self, keys, values):
        self.requests["multi_set"] += 1
        self.store.multi_set(keys, values)
        for rank, own in self.names.items():
            self.store.set(f"{self.store.get(f'answer/{own}').decode()}/{rank}", "")


@pytest.mark.parametrize("ranks", [2, 64, 4096])
def test_requests_of_rank_0_do_not_grow_with_the_ranks(ranks):
    store = dist.HashStore()
    counted = WithOthers(store, ask(store, ranks))
    agree_on_name(counted, job(0, ranks), LIMIT)
    assert counted.requests == {"check": 3, "multi_get": 1, "multi_set": 1}


@pytest.mark.parametrize("ranks", [2, 64])
def test_another_rank_makes_four_requests(ranks):
    store = dist.HashStore()
    counted = CountingStore(store)
    with ThreadPoolExecutor(1) as pool:
        asking = pool.submit(agree_on_name, counted, job(1, ranks), LIMIT)
        store.wait(["asks/1"])
        store.set(f"answer/{store.get('asks/1').decode()}", "0" * 32)
        assert asking.result(5) == "0" * 32
    assert counted.requests == {"set": 2, "wait": 1, "get": 1}


def test_ranks_of_a_new_start_get_its_name_in_the_store_of_the_old_one():
    store = dist.HashStore()
    with ThreadPoolExecutor(3) as pool:
        starts = [
            set(pool.map(lambda rank: agree_on_name(store, job(rank, 3), LIMIT), (0, 2, 1)))
            for _ in range(3)
        ]
    assert list(map(len, starts)) == [1, 1, 1]
    assert len(set.union(*starts)) == 3


def test_ranks_that_do_not_come_are_named():
    store = dist.HashStore()
    store.set("asks/1", uuid4().hex)
    store.set("asks/3", uuid4().hex)
    with pytest.raises(dist.DistError, match=r"ranks \[2, 4\] did not come"):
        agree_on_name(store, job(0, 5), timedelta(seconds=0.1))


def test_ranks_of_the_old_start_alone_are_named():
    store = dist.HashStore()
    ask(store, 3)
    with pytest.raises(dist.DistError, match=r"ranks \[1, 2\] did not come"):
        agree_on_name(store, job(0, 3), timedelta(seconds=0.1))
