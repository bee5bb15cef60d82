"""Joining, adopting and leaving the group of torch.distributed."""

import os
import re
import socket
import threading
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from shardcore.adapters.ranks.job import devices, exchange, process_group, rendezvous
from shardcore.adapters.ranks.job.forked_ranks import free_port
from shardcore.adapters.torch_private import runs_on_gloo
from shardcore.domain.errors import EnvironmentProblem
from shardcore.domain.ranks.job import Job, resolve_job
from shardcore.reporting import errors
from shardcore.testing import run_ranks
from tests import warm


def test_started_from_the_environment_and_ended():
    def program(rank):
        ours = process_group.start(resolve_job(environ=os.environ), timeout=30)
        exchange.share_secret()
        # A rank that ends its group at once breaks those that are still connecting.
        exchange.gather(None)
        place = process_group.rank(), process_group.world_size()
        facts = (*place, dist.get_backend(), devices.device_type())
        process_group.stop(ours)
        process_group.stop(ours)
        return facts, dist.is_initialized(), process_group.world_size()

    results = run_ranks(program, 2, init=False)
    assert results == [((rank, 2, "gloo", "cpu"), False, 1) for rank in range(2)]


def test_started_from_addresses():
    addresses = f"127.0.0.1:{free_port()},127.0.0.1:{free_port()}"

    def program(rank):
        process_group.start(resolve_job(addresses, process_id=rank, environ={}))
        return process_group.rank()

    assert run_ranks(program, 2, init=False) == [0, 1]


def test_a_group_of_the_user_is_adopted_and_left_alone():
    def program(rank):
        process_group.stop(process_group.start(resolve_job(environ=os.environ)))
        process_group.stop(process_group.start(None))
        return process_group.rank(), process_group.world_size(), dist.is_initialized()

    assert run_ranks(program, 2) == [(0, 2, True), (1, 2, True)]


def test_a_job_that_is_not_the_group_of_the_user_is_refused():
    def program(rank):
        with pytest.raises(EnvironmentProblem) as refused:
            process_group.start(resolve_job("a:1,a:2,a:3", process_id=2, environ={}))
        return str(refused.value)

    for rank, message in enumerate(run_ranks(program, 2)):
        assert "Expected rank 2 of 3" in message
        assert "the argument process_id" in message
        assert f"is rank {rank} of 2" in message
        assert "do not call init_process_group" in message


def test_gloo_is_found_by_the_device_that_it_serves():
    def program(rank):
        dist.init_process_group(
            "cpu:gloo",
            init_method=f"tcp://127.0.0.1:{os.environ['MASTER_PORT']}",
            rank=rank,
            world_size=2,
        )
        groups = dist.group.WORLD, dist.new_group(backend="gloo")
        devices = torch.device("cpu"), torch.device("cuda")
        return [runs_on_gloo(group.group_name, each) for group in groups for each in devices]

    assert run_ranks(program, 2, init=False) == [[True, False, True, True]] * 2


def test_objects_are_gathered_in_the_order_of_ranks():
    def program(rank):
        return exchange.gather({"rank": rank, "text": "x" * rank})

    expected = [{"rank": rank, "text": "x" * rank} for rank in range(3)]
    assert run_ranks(program, 3) == [expected] * 3


def test_no_collective_leaves_the_main_thread():
    def program(rank):
        messages = []

        def work():
            with pytest.raises(RuntimeError) as refused:
                exchange.gather(1)
            messages.append(str(refused.value))

        thread = threading.Thread(target=work, name="a-callback")
        thread.start()
        thread.join()
        return messages

    for (message,) in run_ranks(program, 2):
        assert "gathered on the main thread" in message
        assert "'a-callback'" in message


LIMIT = r"at most until \d\d:\d\d:\d\d \(1 seconds in all\)\.\n"


def test_ranks_that_never_come_are_reported_with_the_remedy(monkeypatch, capfd):
    monkeypatch.setattr(errors, "WAIT_SECONDS", 0.2)

    def program(rank):
        job = Job(0, 2, 0, "127.0.0.1", free_port())
        with pytest.raises(EnvironmentProblem) as refused:
            process_group.start(job, timeout=1)
        return str(refused.value)

    (message,) = run_ranks(program, 1, init=False)
    assert message.startswith("Rank 0 of 2 could not join its group at tcp://127.0.0.1:")
    assert "within 1 seconds" in message
    assert "Check that all 2 processes were started" in message
    said = r"\[rank 0\] waits for the other 1 of its job to meet at tcp://127.0.0.1:\d+, "
    assert re.search(said + LIMIT, capfd.readouterr().err)


def test_a_port_that_accepts_and_never_answers_is_an_error_after_the_timeout(monkeypatch, capfd):
    monkeypatch.setattr(errors, "WAIT_SECONDS", 0.2)

    def program(rank):
        with socket.create_server(("127.0.0.1", 0)) as other:
            job = Job(1, 2, 1, "127.0.0.1", other.getsockname()[1])
            with pytest.raises(EnvironmentProblem) as refused:
                process_group.start(job, timeout=1)
        return str(refused.value)

    (message,) = run_ranks(program, 1, init=False, timeout=20)
    assert message.startswith("Rank 1 of 2 could not join its group at tcp://127.0.0.1:")
    assert "within 1 seconds" in message
    said = r"\[rank 1\] waits for rank 0 and all others to meet at tcp://127.0.0.1:\d+, "
    assert re.search(said + LIMIT, capfd.readouterr().err)


@pytest.mark.parametrize("wrong", [0, 1])  # 0 holds the store, and ends last
def test_all_ranks_say_which_rank_names_a_wrong_interface_and_what_its_host_has(wrong):
    def program(rank):
        if rank == wrong:
            os.environ["GLOO_SOCKET_IFNAME"] = "lo,nonexistent"
        with pytest.raises(EnvironmentProblem) as refused:
            process_group.start(resolve_job(environ=os.environ), timeout=600)
        return str(refused.value)

    first, second = run_ranks(program, 2, init=False, timeout=20)
    assert first == second
    host = re.escape(repr(socket.gethostname()))
    expected = (
        f"Expected GLOO_SOCKET_IFNAME to name a network interface of host {host} that has an "
        rf"address, got 'nonexistent' on rank {wrong}\. That host has lo\b.*\. Set the variable"
    )
    assert re.match(expected, first), first


def test_a_wrong_interface_is_said_also_if_the_others_never_come(monkeypatch):
    monkeypatch.setattr(rendezvous, "TELL_LIMIT", timedelta(seconds=1))

    def program(rank):
        os.environ["GLOO_SOCKET_IFNAME"] = "nonexistent"
        with pytest.raises(EnvironmentProblem) as refused:
            process_group.start(Job(0, 2, 0, "127.0.0.1", free_port()), timeout=600)
        return str(refused.value)

    (message,) = run_ranks(program, 1, init=False, timeout=20)
    assert "got 'nonexistent' on rank 0" in message


BUSY_AT_THE_END = """
import ctypes, hashlib, os, time
import torch, torch.distributed as dist
from shardcore.adapters.ranks.job import exchange, process_group
from shardcore.adapters.torch_private import runs_on_gloo
from shardcore.domain.ranks.job import resolve_job

def put_away(_):
    for _ in range(4):  # without the interpreter, which this thread of gloo needs in between
        hashlib.pbkdf2_hmac("sha256", b"", b"", 200_000)

ours = process_group.start(resolve_job(environ=os.environ))
exchange.share_secret()
# For ever, as the caches of DTensor keep the groups of a mesh.
ctypes.pythonapi.Py_IncRef(ctypes.py_object(dist.group.WORLD))
work = dist.all_reduce(torch.ones(2), async_op=True)
work.get_future().add_done_callback(put_away)
exchange.gather(None)  # all ranks are here: the first collective is done as well, or nearly
time.sleep(0.05)
process_group.stop(ours)
"""


def test_the_interpreter_ends_when_the_threads_of_gloo_have_put_away_their_work(tmp_path):
    """Else it aborts: "terminate called without an active exception"."""
    script = tmp_path / "busy.py"
    script.write_text(BUSY_AT_THE_END)
    words = ("--standalone", "--nproc_per_node=2", script)
    ended = warm.run_torchrun(words, forks_workers=False)
    assert ended.returncode == 0, ended.stderr


DIVIDES_CORES = """
import os, sys
os.sched_getaffinity = lambda _: range(8)  # so many cores, on any machine
import torch
import shardcore
shardcore.install()
import keras
keras.distribution.initialize()
print(f"threads {torch.get_num_threads()}", flush=True)
"""


def test_ranks_of_torchrun_divide_the_cores_of_their_host(tmp_path):
    script = tmp_path / "cores.py"
    script.write_text(DIVIDES_CORES)
    names = ("OMP_NUM_THREADS", "TORCHELASTIC_RUN_ID")
    environment = {name: value for name, value in os.environ.items() if name not in names}
    log = {"SHARDCORE_LOG": "debug"}
    ended = warm.run_torchrun(("--standalone", "--nproc_per_node=2", script), environment | log)
    assert ended.stdout.count("threads 4") == 2
    assert "4 threads for each rank: 8 cores for 2 ranks of this host" in ended.stderr
