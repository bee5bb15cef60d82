"""Integers and small floats that neither gloo nor NCCL moves: moved as bytes, reduced in others."""

import numpy as np
import pytest
import torch

from tests.distributed.idioms.running import A, run_idioms

COUNTS = np.arange(24).reshape(4, 6) * 2957 % 65521


def moved(make):
    """Each dtype is all-gathered, exchanged and sorted along the sharded dim."""
    for dtype in (torch.int16, torch.uint16, torch.uint32, torch.uint64):
        x = make(COUNTS).to(dtype)
        yield x.tolist(), x.T.tolist()
    for dtype in (torch.float8_e4m3fn, torch.float8_e5m2):
        yield make(A).to(dtype).float() * 1, make(A).to(dtype).tolist()
    x = make(COUNTS.astype("int16"))
    yield x.sort(dim=0)[0], x.sort(dim=1)[0], x.T.reshape(24) * 1, x.flip(0), x.roll(1, 1)


def reduced(make):
    """Sums wrap around as on one device."""
    x = make(COUNTS.astype("int16"))
    for dim in (0, 1):
        yield x.sum(dim, dtype=torch.int16), x.amax(dim), x.amin(dim), x.prod(dim)
    yield x.sum(dtype=torch.int16), x.sum(), x.max(), x.min(), x.float().mean()


@pytest.mark.parametrize("strategy", ["dtensor", "manual"])
def test_they_are_moved_and_reduced(strategy):
    def listed(idiom):
        def run(make):
            return list(idiom(make))

        run.__name__ = idiom.__name__
        return run

    run_idioms([listed(moved), listed(reduced)], strategy, ("last", "first", "replicated"))
