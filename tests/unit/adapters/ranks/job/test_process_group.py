"""The timeout of a process group, the device of a rank, and its backends."""

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from shardcore.adapters.engine.engine import process_groups
from shardcore.adapters.ranks.job import devices, exchange, process_group
from shardcore.adapters.ranks.job.process_group import seconds
from shardcore.adapters.ranks.processes import TorchProcesses
from shardcore.domain.errors import EnvironmentProblem
from shardcore.domain.layouts.mesh import Mesh
from shardcore.domain.ranks.job import Job
from shardcore.ports.world import World


def test_a_process_alone_starts_nothing():
    ours = process_group.start(None)
    assert (process_group.rank(), process_group.world_size()) == (0, 1)
    assert exchange.gather("x") == ["x"]
    process_group.stop(ours)
    assert not dist.is_initialized()


def test_the_timeout_is_the_argument_then_the_variable_then_ten_minutes(monkeypatch):
    monkeypatch.delenv("SHARDCORE_TIMEOUT", raising=False)
    assert seconds(None) == 600
    monkeypatch.setenv("SHARDCORE_TIMEOUT", "90.5")
    assert (seconds(None), seconds(5)) == (90.5, 5)


@pytest.mark.parametrize("text", ["soon", "0", "-3", "nan", "inf", ""])
def test_a_timeout_that_is_no_positive_number_is_refused(monkeypatch, text):
    monkeypatch.setenv("SHARDCORE_TIMEOUT", text)
    with pytest.raises(EnvironmentProblem, match="positive number of seconds"):
        seconds(None)


@pytest.mark.parametrize(
    ("asked", "seen", "expected"),
    [
        ("", None, "cpu"),
        ("", "cuda", "cuda"),
        ("", "mps", "mps"),
        ("", "xpu", "xpu"),
        ("", "privateuseone", "cpu"),  # Keras does not use it either
        ("cpu", "cuda", "cpu"),
        ("cuda:1", "cuda", "cuda"),
    ],
)
def test_the_device_is_that_of_keras(monkeypatch, asked, seen, expected):
    monkeypatch.setenv("KERAS_TORCH_DEVICE", asked)
    found = None if seen is None else torch.device(seen)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available: found)
    assert devices.device_type() == expected


def job(rank, ranks=2):
    return Job(rank, ranks, rank, "127.0.0.1", 1234)


@pytest.mark.parametrize("device", ["mps", "xpu"])
def test_several_ranks_on_a_device_for_one_are_refused(monkeypatch, device):
    monkeypatch.setenv("KERAS_TORCH_DEVICE", device)
    with pytest.raises(EnvironmentProblem) as refused:
        process_group.start(job(0))
    assert "the 2 ranks of this job to compute on CPUs or CUDA devices" in str(refused.value)
    assert f"computes on '{device}'" in str(refused.value)
    assert "set KERAS_TORCH_DEVICE=cpu before Keras is imported" in str(refused.value)
    assert devices.backend(job(0, 1)) == "gloo"


@pytest.fixture
def bound(monkeypatch):
    """Two CUDA devices that are not there; the devices to which a rank is bound."""
    devices = []
    monkeypatch.setenv("KERAS_TORCH_DEVICE", "cuda")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", devices.append)
    return devices


def test_a_rank_is_bound_to_the_device_of_its_local_rank(bound):
    assert devices.backend(job(1)) == "cpu:gloo,cuda:nccl"
    assert bound == [1]


def launch(monkeypatch, rank, ranks):
    launched = {"RANK": rank, "WORLD_SIZE": ranks, "LOCAL_RANK": rank, "MASTER_PORT": 1}
    for name, value in {**launched, "MASTER_ADDR": "127.0.0.1"}.items():
        monkeypatch.setenv(name, str(value))


def test_a_rank_takes_its_device_before_it_joins_the_job(bound, monkeypatch):
    launch(monkeypatch, 1, 2)
    TorchProcesses().take_device()
    assert bound == [1]


def test_before_it_joins_the_job_a_rank_without_a_device_is_no_error(bound, monkeypatch):
    launch(monkeypatch, 2, 3)
    TorchProcesses().take_device()  # its program may start a group by itself
    assert bound == []


def test_a_rank_without_a_device_is_refused(bound):
    with pytest.raises(EnvironmentProblem, match=r"local rank 2 \(rank 2\), but this host shows 2"):
        devices.backend(job(2, 3))
    assert bound == []


@pytest.mark.parametrize(
    ("rank", "ranks", "device", "backend"),
    [(2, 3, 0, "gloo"), (1, 3, 1, "gloo"), (1, 2, 1, "cpu:gloo,cuda:nccl")],
)
def test_ranks_share_devices_over_gloo_where_the_user_asks_for_it_and_they_are_too_few(
    bound, monkeypatch, rank, ranks, device, backend
):
    monkeypatch.setenv("SHARDCORE_SHARE_GPUS", "1")
    assert devices.backend(job(rank, ranks)) == backend
    assert bound == [device]


def test_no_device_is_no_device_to_share(bound, monkeypatch):
    monkeypatch.setenv("SHARDCORE_SHARE_GPUS", "1")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with pytest.raises(EnvironmentProblem, match="but this host shows 0"):
        devices.backend(job(0))


def test_another_value_of_the_variable_is_refused(bound, monkeypatch):
    monkeypatch.setenv("SHARDCORE_SHARE_GPUS", "yes")
    with pytest.raises(EnvironmentProblem, match="SHARDCORE_SHARE_GPUS to be 1 or 0, got 'yes'"):
        devices.backend(job(2, 3))


@pytest.mark.parametrize(
    ("device", "created"),
    [
        (None, [([0, 1], True), ([1, 3], True)]),
        # NCCL splits the group of the job then: a rank that is missing would block all others.
        ("cuda:1", [([0, 1], False), ([2, 3], False), ([0, 2], False), ([1, 3], False)]),
    ],
)
def test_all_ranks_create_the_groups_of_a_job_that_is_bound_to_a_device(
    monkeypatch, device, created
):
    calls = []

    def new_group(processes, timeout, use_local_synchronization):
        calls.append((processes, use_local_synchronization))
        return str(processes)

    bound_to = None if device is None else torch.device(device)
    job_group = SimpleNamespace(bound_device_id=bound_to)
    monkeypatch.setattr(dist, "group", SimpleNamespace(WORLD=job_group))
    monkeypatch.setattr(dist, "get_world_size", lambda: 4)
    monkeypatch.setattr(dist, "new_group", new_group)
    groups = process_groups(World(Mesh((2, 2), ("data", "model")), (0, 1, 2, 3), 1, "cuda"))
    assert groups == {"data": "[1, 3]", "model": "[0, 1]"}
    assert sorted(calls) == sorted(created)
