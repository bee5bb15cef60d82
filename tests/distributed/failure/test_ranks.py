"""The harness itself: results in order, failures with their cause, nothing left behind."""

import atexit
import ctypes
import multiprocessing
import os
import time

import numpy as np
import pytest
import torch
import torch.distributed as dist

from shardcore.testing import RankFailed, run_ranks


def test_results_come_in_the_order_of_ranks():
    def program(rank, base):
        time.sleep(0.2 * (2 - rank))
        return {"rank": rank, "rows": np.full(2, base + rank)}

    results = run_ranks(program, 3, 10)
    assert [result["rank"] for result in results] == [0, 1, 2]
    np.testing.assert_array_equal([result["rows"][0] for result in results], [10, 11, 12])


def test_the_ranks_share_a_gloo_group_and_torchrun_s_environment():
    def program(rank):
        total = torch.tensor([float(rank + 1)])
        dist.all_reduce(total)
        names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR")
        values = tuple(os.environ[name] for name in names)
        return total.item(), dist.get_backend(), torch.get_num_threads(), values

    for rank, result in enumerate(run_ranks(program, 2)):
        assert result == (3.0, "gloo", 1, (str(rank), "2", str(rank), "2", "127.0.0.1"))
    assert not dist.is_initialized()


def test_without_init_a_rank_starts_the_group_from_the_environment():
    def program(rank):
        started = dist.is_initialized()
        dist.init_process_group("gloo")
        return started, dist.get_rank()

    assert run_ranks(program, 2, init=False) == [(False, 0), (False, 1)]


def test_ranks_can_train_after_this_process_has_trained():
    def program(rank):
        weight = torch.ones(64, 64, requires_grad=True)
        (weight @ weight).sum().backward()
        return weight.grad.sum().item()

    expected = program(0)
    assert run_ranks(program, 2) == [expected, expected]


def test_the_first_failing_rank_is_named_with_its_traceback():
    def program(rank):
        if rank == 1:
            raise KeyError("the cause")
        dist.barrier()

    began = time.monotonic()
    with pytest.raises(RankFailed) as failed:
        run_ranks(program, 3)
    assert time.monotonic() - began < 15
    message = str(failed.value)
    assert failed.value.rank == 1
    assert message.startswith("rank 1 failed:\nTraceback")
    assert message.index("raise KeyError") < message.index("KeyError: 'the cause'")
    assert multiprocessing.active_children() == []


def test_a_rank_that_dies_is_named_before_the_errors_that_follow_from_it():
    def program(rank):
        if rank == 1:
            os.kill(os.getpid(), 9)
        dist.barrier()

    with pytest.raises(RankFailed, match=r"^rank 1 ended without a result, exit code -9"):
        run_ranks(program, 2)
    assert multiprocessing.active_children() == []


def test_a_rank_that_dies_is_named_though_its_own_process_lives():
    def program(rank):
        if rank == 1:
            if os.fork() == 0:  # it holds the pipe of the rank
                time.sleep(3)
                os._exit(0)
            os.kill(os.getpid(), 9)
        time.sleep(0.5)
        raise ConnectionError("rank 1 is gone")

    with pytest.raises(RankFailed, match=r"^rank 1 ended without a result, exit code -9"):
        run_ranks(program, 2)


def test_the_stacks_of_a_rank_that_crashes_are_shown():
    def crashes_here(rank):
        if rank == 1:
            ctypes.string_at(0)
        dist.barrier()

    with pytest.raises(RankFailed, match=r"^rank 1 ended") as failed:
        run_ranks(crashes_here, 2)
    first, *_ = str(failed.value).split("\nrank 0 failed")
    assert "exit code -11" in first
    assert "Segmentation fault" in first
    assert "in crashes_here" in first
    assert "Extension modules" not in first


def test_a_result_that_cannot_be_pickled_is_a_failure_of_its_rank():
    with pytest.raises(RankFailed, match=r"^rank 0 failed:\n"):
        run_ranks(lambda rank: lambda: rank, 1)


def test_the_stacks_of_ranks_that_time_out_are_shown():
    def hangs_here(rank):
        if rank == 0:
            dist.barrier()
        while rank == 1:
            time.sleep(0.01)

    with pytest.raises(RankFailed) as failed:
        run_ranks(hangs_here, 2, timeout=4)
    message = str(failed.value)
    assert message.startswith("rank 0, 1 did not end within 4 seconds")
    assert message.count("in hangs_here") == 2
    assert "in barrier" in message
    assert multiprocessing.active_children() == []


def test_an_exit_function_of_a_rank_runs_in_that_rank_only(tmp_path):
    def program(rank):
        atexit.register((tmp_path / str(rank)).touch)

    run_ranks(program, 2, init=False)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0", "1"]


def test_nothing_is_printed(capfd):
    run_ranks(lambda rank: None, 2)
    assert capfd.readouterr() == ("", "")


def test_a_rank_begins_with_a_fresh_keras_session():
    keras = pytest.importorskip("keras")
    keras.layers.Dense(1)
    names = run_ranks(lambda rank: keras.layers.Dense(1).name, 1)
    assert names == ["dense"]
