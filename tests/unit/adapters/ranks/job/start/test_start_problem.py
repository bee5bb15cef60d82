"""The problem of a rank that cannot start, which all ranks hear before they connect."""

from concurrent.futures import ThreadPoolExecutor, wait
from datetime import timedelta

import pytest
import torch.distributed as dist

from shardcore.adapters.ranks.job.rendezvous import share_problem
from shardcore.domain.ranks.job import Job

LIMIT = timedelta(seconds=10)


def come(store, rank, problem="", ranks=3):
    return share_problem(problem, store, Job(rank, ranks, rank, "127.0.0.1", 1234), LIMIT)


@pytest.fixture
def threads():
    with ThreadPoolExecutor(3) as pool:
        yield pool


def test_ranks_without_a_problem_go_on_once_all_have_come(threads):
    store = dist.HashStore()
    early = [threads.submit(come, store, rank) for rank in (2, 0)]
    assert not wait(early, 0.1).done
    assert come(store, 1) == ""
    assert [each.result(1) for each in early] == ["", ""]


def test_a_rank_with_a_problem_stays_until_the_others_know_it(threads):
    store = dist.HashStore()
    with_problem = threads.submit(come, store, 0, "eth7 \x1b[31mis wrong")
    early = threads.submit(come, store, 2)
    assert not wait([with_problem], 0.1).done
    assert come(store, 1) == "eth7 [31mis wrong"  # no control character
    assert with_problem.result(1) == early.result(1) == "eth7 [31mis wrong"


def test_a_rank_that_never_comes_is_an_error():
    job = Job(0, 2, 0, "127.0.0.1", 1234)
    with pytest.raises(dist.DistError):
        share_problem("", dist.HashStore(), job, timedelta(seconds=0.1))
