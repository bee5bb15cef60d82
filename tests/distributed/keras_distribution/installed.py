"""Programs on ranks on which shardcore is installed, and without a launcher."""

import os

from keras import distribution as kd

import shardcore
from shardcore.testing import run_ranks

TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")


def installed(program, world_size, *args, init=True):
    """Runs `program(rank, *args)` on ranks where shardcore is installed."""

    def with_shardcore(rank):
        shardcore.install("dtensor")
        return program(rank, *args)

    return run_ranks(with_shardcore, world_size, init=init)


def without_launcher():
    for name in TORCHRUN:
        del os.environ[name]


def mesh_1_2():
    return kd.DeviceMesh((1, 2), ("data", "model"))
