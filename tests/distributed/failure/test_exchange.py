"""Values and work through the store of the process group."""

import time

import pytest

from shardcore.adapters.job import exchange
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
