"""All-gathers on gloo do not run as torch's all-gather of lists, which corrupts the heap."""

import keras
import torch
from torch.profiler import ProfilerActivity, profile

import shardcore
from shardcore.adapters.torch_private import collectives
from shardcore.testing import run_ranks


def gathers(rank):
    """Returns the operators by which three all-gathers under way run, and their results."""
    shardcore.install()
    keras.distribution.initialize()
    values = [
        torch.tensor([10 * rank + 1]),
        torch.tensor([10 * rank + 2]),
        torch.tensor([rank * 1j]),
    ]
    group = torch.distributed.group.WORLD
    with profile(activities=[ProfilerActivity.CPU]) as profiled:
        pending = [collectives.all_gather(value, group) for value in values]
        gathered = [collectives.wait(value).tolist() for value in pending]
    names = {each.key for each in profiled.key_averages() if each.key.startswith("c10d::")}
    return names, gathered


def test_several_under_way_are_no_gathers_of_lists():
    for names, gathered in run_ranks(gathers, 2):
        assert names == {"c10d::_allgather_base_"}
        assert gathered == [[1, 11], [2, 12], [0j, 1j]]
