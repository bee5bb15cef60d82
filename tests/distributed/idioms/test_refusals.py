"""Errors for what cannot be right on sharded tensors: each says what to do instead."""

import warnings

import keras
import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

from shardcore.domain.errors import StrategyError
from shardcore.testing import run_ranks
from tests.distributed.idioms.running import A, B, make
from tests.distributed.programs import distribute


def model():
    return keras.Sequential([keras.Input((6,)), keras.layers.Dense(4, name="head")])


@pytest.mark.parametrize("strategy", ["dtensor", "manual"])
def test_wrappers_and_collectives_of_torch(strategy):
    def program(rank):
        distribute((1, 2), {"head/kernel": (None, "model")}, strategy=strategy)
        sharded = model()
        with pytest.raises(StrategyError, match=r"needs no DistributedDataParallel.*to_local"):
            torch.nn.parallel.DistributedDataParallel(sharded)
        with pytest.raises(StrategyError, match=r"_torch_params.*sharded already.*'fully_sharded'"):
            fully_shard(sharded)
        module = torch.nn.Sequential(torch.nn.Linear(6, 4))
        module[0].weight = torch.nn.Parameter(make(A, "last"))
        with pytest.raises(StrategyError, match=r"'0.weight' of Sequential is sharded"):
            torch.distributed.fsdp.fully_shard(module)
        fully_shard(torch.nn.Linear(6, 4))  # on plain tensors as ever
        with pytest.raises(StrategyError, match=r"allreduce.*got a sharded tensor"):
            dist.all_reduce(sharded.layers[0].kernel.value.detach())
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch's, while it loads its compiler
            with pytest.raises(Exception, match=r"torch.compile\(\) cannot trace.*jit_compile"):
                torch.compile(sharded, backend="eager")(torch.tensor(A))

    run_ranks(program, 2)


@pytest.mark.parametrize("strategy", ["dtensor", "manual"])
def test_values_of_another_mesh(strategy):
    def program(rank):
        distribute((2, 1), strategy=strategy)
        foreign = make(A, "last")
        distribute((1, 2), {"head/kernel": (None, "model")}, strategy=strategy)
        x, kernel = make(B, "last"), model().layers[0].kernel
        writes = [
            lambda: x.copy_(foreign),
            lambda: x.add_(foreign),
            lambda: x.__setitem__(0, foreign[0]),
            lambda: x[0].copy_(foreign[0]),
            lambda: torch._foreach_add([x], [foreign]),
            lambda: torch._foreach_add_([x], [foreign]),
            lambda: setattr(x, "data", foreign),
            lambda: kernel.assign(foreign.T),
        ]
        for write in writes:
            with pytest.raises(StrategyError, match="of two distributions"):
                write()

    run_ranks(program, 2)
