"""Errors for what cannot be right on sharded tensors: each says what to do instead."""

import warnings

import keras
import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

from shardcore.domain.errors import ShardedTensorError
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
        with pytest.raises(ShardedTensorError, match=r"needs no DistributedDataParallel.*to_local"):
            torch.nn.parallel.DistributedDataParallel(sharded)
        with pytest.raises(
            ShardedTensorError, match=r"_torch_params.*sharded already.*'fully_sharded'"
        ):
            fully_shard(sharded)
        with pytest.raises(
            ShardedTensorError, match=r"FullyShardedDataParallel\(\) .*sharded already"
        ):
            FullyShardedDataParallel(sharded)
        module = torch.nn.Sequential(torch.nn.Linear(6, 4))
        module[0].weight = torch.nn.Parameter(make(A, "last"))
        with pytest.raises(ShardedTensorError, match=r"'0.weight' of Sequential is sharded"):
            torch.distributed.fsdp.fully_shard(module)
        fully_shard(torch.nn.Linear(6, 4))  # on plain tensors as ever
        with pytest.raises(ShardedTensorError, match=r"allreduce.*got a sharded tensor"):
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
            with pytest.raises(ShardedTensorError, match="of two distributions"):
                write()

    run_ranks(program, 2)


# Of other shapes than `A`, which has (4, 6); some have those of its local shards.
SHAPES = [(4, 3), (2, 6), (3,), (4, 5), (2, 4, 6)]
WRITES = {
    "mul_": lambda x, y: x.mul_(y),
    "add_": lambda x, y: x.add_(y, alpha=2),
    "copy_": lambda x, y: x.copy_(y),
    "addcmul_": lambda x, y: x.addcmul_(y, y),
    "clamp_": lambda x, y: x.clamp_(y, y),
    "masked_fill_": lambda x, y: x.masked_fill_(y > 0, 1.0),
    "of a row": lambda x, y: x[0].add_(y),
    "of a scalar": lambda x, y: x.sum().add_(y),
    "in a list": lambda x, y: torch._foreach_mul_([x], [y]),
    "into out": lambda x, y: torch.add(x, y, out=x),
}
# A value of (2, 4, 6) is right for them.
OPERATORS = {
    "add": lambda x, y: x + y,
    "where": lambda x, y: torch.where(x > 0, x, y),
    "lerp": lambda x, y: torch.lerp(x, y, y),
    "addmm": lambda x, y: torch.addmm(y, torch.ones(4, 4), x),
}


def error_of(call, *tensors):
    with pytest.raises(RuntimeError) as raised:
        call(*tensors)
    return str(raised.value)


@pytest.mark.parametrize("strategy", ["dtensor", "manual"])
def test_shapes_that_are_not_broadcast(strategy):
    """The errors are those of torch about the full tensors, also where local shards would fit."""

    def program(rank):
        distribute((1, 2), strategy=strategy)
        calls = [(call, shape) for call in WRITES.values() for shape in SHAPES]
        calls += [(call, shape) for call in OPERATORS.values() for shape in SHAPES[:4]]
        for call, shape in calls:
            value = np.ones(shape, "float32")
            expected = error_of(call, torch.tensor(A), torch.tensor(value))
            for layout in ("last", "first", "pending"):
                for other in (torch.tensor(value), make(value, "replicated")):
                    x = make(A, layout)
                    assert error_of(call, x, other) == expected
                    assert torch.equal(x.full_tensor(), torch.tensor(A))

    run_ranks(program, 2)
