"""Ranks of one host divide its cores, unless the user has set a number of threads."""

import os
import subprocess
import sys

import pytest
import torch

from shardcore.adapters.ranks.job import cores, devices, exchange, process_group


@pytest.fixture
def given(monkeypatch):
    """A job of ranks with these hosts and numbers of cores; the number of threads that is set."""
    found = []
    monkeypatch.setattr(torch, "set_num_threads", found.append)
    monkeypatch.setattr(process_group, "is_simulated", lambda: False)
    monkeypatch.setattr(devices, "device_type", lambda: "cpu")
    monkeypatch.setattr(cores, "_most_threads", lambda cores, parent: cores)

    def job(everyone):
        monkeypatch.setattr(process_group, "world_size", lambda: len(everyone))
        monkeypatch.setattr(exchange, "gather", lambda own: everyone)
        cores.divide()
        return found

    return job


@pytest.mark.parametrize(
    ("everyone", "threads"),
    [
        ([("a", 8, 8)] * 2, [4]),
        ([("a", 8, 8)] * 3, [2]),
        ([("a", 2, 2)] * 4, [1]),  # a rank has a thread, whatever it is
        ([("a", 8, 8), ("b", 8, 8)], [8]),
        ([("a", 8, 8)] * 2 + [("b", 4, 4)] * 2, [2]),  # on every rank: they round alike
        ([("a", 8, 3)] * 2, [3]),  # what the user has given torch
        ([("a", 8, 8), ("a", 8, 0)], []),  # a rank whose user has set a number
        ([("a", 8, 8)], []),
    ],
)
def test_every_rank_gets_the_smallest_share(given, everyone, threads):
    assert given(everyone) == threads


def test_a_rank_on_a_gpu_keeps_its_threads(given, monkeypatch):
    own = []
    monkeypatch.setattr(devices, "device_type", lambda: "cuda")
    monkeypatch.setattr(exchange, "gather", own.append)
    monkeypatch.setattr(process_group, "world_size", lambda: 2)
    with pytest.raises(TypeError):  # from the gathered None
        cores.divide()
    assert own[0][2] == 0


@pytest.fixture
def torchrun():
    """Starts a process as torchrun's, in an environment; returns its number."""
    started = []

    def start(**variables):
        environment = {n: v for n, v in os.environ.items() if n != "OMP_NUM_THREADS"} | variables
        command = [sys.executable, "-c", "print(flush=True); input()"]
        started.append(subprocess.Popen(command, env=environment, stdin=-1, stdout=-1))
        started[-1].stdout.readline()  # Linux may show no environment before the process runs
        return started[-1].pid

    yield start
    for each in started:
        each.communicate(b"\n")


def test_one_thread_is_the_users_if_torchrun_was_started_with_it(monkeypatch, torchrun):
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    assert cores._most_threads(8, torchrun()) == 0  # no torchrun
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "a job")
    assert cores._most_threads(8, torchrun()) == 8
    assert cores._most_threads(8, torchrun(OMP_NUM_THREADS="1")) == 0
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)  # by torch.set_num_threads
    assert cores._most_threads(8, torchrun()) == 0
    monkeypatch.delenv("OMP_NUM_THREADS")
    assert cores._most_threads(8, torchrun()) == 3
