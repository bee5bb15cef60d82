"""Steps on two ranks, of which a pass changes the trace."""

import torch
import torch.distributed as dist

from shardcore.adapters.capture.passes.collectives import with_late_waits
from shardcore.adapters.torch_private import collectives
from shardcore.testing import run_ranks
from tests.traces import changed

X = torch.arange(6.0).reshape(2, 3)


def reduced(x, op="sum"):
    return collectives.wait(collectives.all_reduce(x, op, dist.group.WORLD))


def on_two_ranks(step, one_pass=lambda trace: trace):
    """The operators of `step` as recorded, and after a pass and waits."""

    def program(rank):
        return changed(step, lambda trace: with_late_waits(one_pass(trace)), X + rank)

    first, second = run_ranks(program, 2)
    assert first == second
    return first
