"""The rank and job of this process: three sources, their order, and the errors."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardcore.domain.errors import EnvironmentProblem
from shardcore.domain.ranks.job import Job, resolve_job

TORCHRUN = {
    "RANK": "3",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "1",
    "MASTER_ADDR": "node0",
    "MASTER_PORT": "29500",
}
KERAS = {
    "KERAS_DISTRIBUTION_JOB_ADDRESSES": "10.0.0.1:1234,10.0.0.2:2345",
    "KERAS_DISTRIBUTION_NUM_PROCESSES": "2",
    "KERAS_DISTRIBUTION_PROCESS_ID": "1",
}


def values(job):
    return (job.rank, job.world_size, job.local_rank, job.master_address, job.master_port)


def test_no_arguments_mean_a_single_process():
    assert resolve_job(environ={}) is None


@pytest.mark.parametrize(
    "environ",
    [
        {"MASTER_ADDR": "node0", "MASTER_PORT": "29500"},
        {"LOCAL_RANK": "0"},
        {"RANK": "", "WORLD_SIZE": ""},
        {"WORLD_SIZE": "1"},
        {"RANK": "0", "WORLD_SIZE": "1"},
    ],
)
def test_an_environment_without_a_job_is_a_single_process(environ):
    assert resolve_job(environ=environ) is None


def test_torchrun():
    job = resolve_job(environ=TORCHRUN)
    assert values(job) == (3, 4, 1, "node0", 29500)
    assert job.source == {
        "rank": "RANK",
        "world_size": "WORLD_SIZE",
        "local_rank": "LOCAL_RANK",
        "master_address": "MASTER_ADDR and MASTER_PORT",
        "master_port": "MASTER_ADDR and MASTER_PORT",
    }


def test_torchrun_with_one_process_is_a_job():
    environ = TORCHRUN | {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}
    assert values(resolve_job(environ=environ)) == (0, 1, 0, "node0", 29500)


def test_keras_variables():
    job = resolve_job(environ=KERAS)
    assert values(job) == (1, 2, 0, "10.0.0.1", 1234)
    assert job.source["rank"] == "KERAS_DISTRIBUTION_PROCESS_ID"


def test_arguments():
    assert values(resolve_job("a:1,b:2", 2, 0, environ={})) == (0, 2, 0, "a", 1)


def test_keras_variables_win_over_torchrun_s_each_on_its_own():
    environ = TORCHRUN | {"KERAS_DISTRIBUTION_PROCESS_ID": "2"}
    job = resolve_job(environ=environ)
    assert values(job) == (2, 4, 1, "node0", 29500)
    assert (job.source["rank"], job.source["world_size"]) == (
        "KERAS_DISTRIBUTION_PROCESS_ID",
        "WORLD_SIZE",
    )


def test_arguments_win_over_keras_variables_each_on_its_own():
    job = resolve_job("x:7,y:8", process_id=0, environ=KERAS)
    assert values(job) == (0, 2, 0, "x", 7)
    assert job.source["master_address"] == "the argument job_addresses"
    assert job.source["world_size"] == "KERAS_DISTRIBUTION_NUM_PROCESSES"


def test_rank_zero_as_an_argument_wins():
    assert resolve_job(process_id=0, environ=TORCHRUN).rank == 0


def test_the_number_of_addresses_gives_the_world_size():
    job = resolve_job("a:1,b:2,c:3", process_id=2, environ={})
    assert job.world_size == 3
    assert job.source["world_size"] == "the number of addresses in the argument job_addresses"


def test_the_coordinator_s_address_is_enough():
    assert values(resolve_job("a:1", 4, 3, environ={})) == (3, 4, 0, "a", 1)


def test_addresses_may_have_spaces_and_be_ipv6():
    assert values(resolve_job(" [::1]:12 , [fe80::2]:13", process_id=0, environ={})) == (
        (0, 2, 0, "::1", 12)
    )


@pytest.mark.parametrize(
    ("addresses", "expected"),
    [
        ("a:1,a:2,b:1,b:2", [0, 1, 0, 1]),
        ("a:1,b:1,a:2,b:2", [0, 0, 1, 1]),
        ("a:1", [0, 0, 0, 0]),
        ("localhost:1", [0, 1, 2, 3]),
        ("[::1]:1", [0, 1, 2, 3]),
    ],
)
def test_local_rank_where_it_is_not_set(addresses, expected):
    jobs = [resolve_job(addresses, 4, rank, environ={}) for rank in range(4)]
    assert [job.local_rank for job in jobs] == expected


def test_local_rank_that_is_set_wins_over_the_addresses():
    assert resolve_job("a:1,a:2", process_id=0, environ={"LOCAL_RANK": "1"}).local_rank == 1


@given(st.lists(st.sampled_from("abc"), min_size=2, max_size=8))
def test_ranks_of_one_host_have_the_local_ranks_from_zero_up(hosts):
    addresses = ",".join(f"{host}:{port}" for port, host in enumerate(hosts, 1))
    jobs = [resolve_job(addresses, process_id=rank, environ={}) for rank in range(len(hosts))]
    for host in set(hosts):
        mine = [job.local_rank for job, each in zip(jobs, hosts, strict=True) if each == host]
        assert mine == list(range(len(mine)))
    assert {(job.master_address, job.master_port) for job in jobs} == {(hosts[0], 1)}


@pytest.mark.parametrize(
    ("arguments", "environ", "parts"),
    [
        ((None, None, 1), {}, ["the number of processes", "num_processes", "WORLD_SIZE"]),
        ((), {"RANK": "1"}, ["the number of processes", "num_processes", "WORLD_SIZE"]),
        (("a:1", None, 0), {}, ["the number of processes", "num_processes"]),
        (("a:1,b:2",), {}, ["the rank", "2 processes", "process_id", "RANK"]),
        ((), {"WORLD_SIZE": "2"}, ["the rank", "(from WORLD_SIZE)", "process_id"]),
        ((None, 2, 0), {}, ["the address of rank 0", "job_addresses", "MASTER_PORT"]),
        ((None, 2, 0), {"MASTER_ADDR": "a"}, ["the address of rank 0", "MASTER_PORT"]),
        (("a:1,b:2", 3, 0), {}, ["2 addresses from the argument job_addresses", "3 processes"]),
        (("a:1,b:2", None, 0), {"WORLD_SIZE": "4"}, ["2 addresses", "4 processes from WORLD_SIZE"]),
        (("a:1,b:2", 2, 2), {}, ["rank", "from 0 to 1", "got 2", "the argument process_id"]),
        ((), TORCHRUN | {"RANK": "-1"}, ["rank", "from 0 to 3", "got -1", "RANK"]),
        ((), TORCHRUN | {"RANK": "one"}, ["an integer", "RANK", "'one'"]),
        ((), TORCHRUN | {"WORLD_SIZE": "0"}, ["world_size", "at least 1", "got 0"]),
        ((), TORCHRUN | {"LOCAL_RANK": "x"}, ["an integer", "LOCAL_RANK", "'x'"]),
        ((), TORCHRUN | {"LOCAL_RANK": "4"}, ["local_rank", "from 0 to 3", "LOCAL_RANK"]),
        ((), TORCHRUN | {"MASTER_PORT": "http"}, ["an integer", "MASTER_PORT", "'http'"]),
        ((), TORCHRUN | {"MASTER_PORT": "0"}, ["master_port", "from 1 to 65535", "got 0"]),
        ((None, 2.5, 0), {}, ["an integer", "num_processes", "2.5"]),
        ((None, True, 0), {}, ["an integer", "num_processes", "True"]),
        ((["a:1", "b:2"], 2, 0), {}, ["one string", "['a:1', 'b:2']", "commas"]),
        (("a", 2, 0), {}, ["host:port", "'a'", "the argument job_addresses"]),
        (("a:1,b", 2, 0), {}, ["host:port", "'b'"]),
        (("a:1,", 2, 0), {}, ["host:port", "''"]),
        ((":1,b:2", 2, 0), {}, ["host:port", "':1'"]),
        (("a:x", 2, 0), {}, ["host:port", "'a:x'"]),
        (("a:70000", 2, 0), {}, ["from 1 to 65535", "'a:70000'"]),
        (("::1:80", 2, 0), {}, ["'[::1]:1234'", "'::1:80'"]),
    ],
)
def test_incomplete_or_wrong_settings_of_a_job_are_refused_by_name(arguments, environ, parts):
    with pytest.raises(EnvironmentProblem) as refused:
        resolve_job(*arguments, environ=environ)
    for part in parts:
        assert part in str(refused.value)


def test_a_job_checks_itself():
    with pytest.raises(EnvironmentProblem, match="master_address to be a host name"):
        Job(0, 1, 0, "", 1)
