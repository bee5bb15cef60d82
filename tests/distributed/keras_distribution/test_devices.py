"""`keras.distribution`: the job and its devices, on real ranks."""

import os

import keras
import numpy as np
import pytest
import torch.distributed as dist
from keras import distribution as kd

from shardcore.adapters.ranks.job.forked_ranks import free_port
from shardcore.domain.errors import EnvironmentProblem, MeshError
from tests.distributed.keras_distribution.installed import installed, without_launcher


def test_initialize_by_torchrun_s_variables():
    def program(rank):
        before = dist.is_initialized()
        kd.initialize()
        kd.initialize()
        return before, dist.get_rank(), dist.get_world_size(), dist.get_backend()

    assert installed(program, 2, init=False) == [(False, 0, 2, "gloo"), (False, 1, 2, "gloo")]


@pytest.mark.parametrize("given_by", ["arguments", "environment"])
def test_initialize_by_arguments_and_keras_variables_before_torchrun_s(given_by):
    """The ranks are given in reverse of torchrun's, so that it shows who wins."""
    port = free_port()
    addresses = f"127.0.0.1:{port},127.0.0.1:{port + 1}"

    def program(rank):
        if given_by == "arguments":
            os.environ["KERAS_DISTRIBUTION_PROCESS_ID"] = str(rank)
            kd.initialize(addresses, num_processes=2, process_id=1 - rank)
        else:
            os.environ["KERAS_DISTRIBUTION_JOB_ADDRESSES"] = addresses
            os.environ["KERAS_DISTRIBUTION_NUM_PROCESSES"] = "2"
            os.environ["KERAS_DISTRIBUTION_PROCESS_ID"] = str(1 - rank)
            kd.initialize()
        data_parallel = kd.DataParallel()
        return dist.get_rank(), data_parallel._process_id, data_parallel.num_processes

    assert installed(program, 2, init=False) == [(1, 1, 2), (0, 0, 2)]


def test_initialize_counts_the_addresses():
    def program(rank):
        with pytest.raises(EnvironmentProblem, match=r"one address per process, got 3 .* 2 proc"):
            kd.initialize("a:1,b:2,c:3", num_processes=2, process_id=rank)
        return dist.is_initialized()

    assert installed(program, 1, init=False) == [False]


def test_without_a_launcher_there_is_one_device_and_initialize_does_nothing():
    def program(rank):
        without_launcher()
        kd.initialize()
        model_parallel = kd.ModelParallel(
            layout_map=kd.LayoutMap(kd.DeviceMesh((1, 1), ("data", "model")))
        )
        return dist.is_initialized(), kd.list_devices(), model_parallel.num_processes

    assert installed(program, 1, init=False) == [(False, ["cpu:0"], 1)]


def test_the_ranks_draw_from_one_seed():
    def program(rank):
        kd.list_devices()
        return np.random.normal(), float(keras.random.normal(()))

    first, second = installed(program, 2, init=False)
    assert first == second
    assert first != installed(program, 2, init=False)[0]


def test_a_seed_of_the_user_is_kept():
    def program(rank):
        keras.utils.set_random_seed(5)
        kd.list_devices()
        return np.random.normal()

    assert installed(program, 2, init=False) == [np.random.RandomState(5).normal()] * 2


@pytest.mark.parametrize("given", [None, "cpu", "CPU"])
def test_devices_are_those_of_the_whole_job(given):
    def program(rank):
        return kd.list_devices(given), kd.get_device_count(given)

    assert installed(program, 2) == [(["cpu:0", "cpu:1"], 2)] * 2


@pytest.mark.parametrize("given", ["gpu", "tpu"])
def test_devices_of_a_kind_that_is_not_here(given):
    assert installed(lambda rank: (kd.list_devices(given), kd.get_device_count(given)), 1) == [
        ([], 0)
    ]


@pytest.mark.parametrize("device", ["mps", "xpu"])
def test_one_rank_computes_on_another_accelerator(device):
    def program(rank):
        without_launcher()
        os.environ["KERAS_TORCH_DEVICE"] = device  # as if Keras computed there
        mesh = kd.DeviceMesh((1, 1), ("data", "model"))
        return kd.list_devices(), kd.list_devices(device), kd.list_devices("cpu"), mesh.shape

    names = [f"{device}:0"]
    assert installed(program, 1, init=False) == [(names, names, ["cpu:0"], (1, 1))]


def test_several_ranks_on_another_accelerator_are_refused():
    def program(rank):
        os.environ["KERAS_TORCH_DEVICE"] = "mps"
        with pytest.raises(EnvironmentProblem, match="computes on 'mps', which serves one rank"):
            kd.list_devices()

    installed(program, 2)  # their group is started
    installed(program, 2, init=False)


def test_an_unknown_kind_of_device_is_an_error():
    def program(rank):
        with pytest.raises(MeshError, match="device type 'quantum': give 'cpu', 'gpu' or 'tpu'"):
            kd.list_devices("quantum")

    installed(program, 1)
