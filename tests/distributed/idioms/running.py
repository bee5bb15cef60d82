"""Runs short programs on a plain tensor and on sharded ones, and compares."""

import warnings

import numpy as np
import torch

import shardcore
from shardcore.adapters.engine.tensor import ShardedTensor
from shardcore.testing import run_ranks
from tests.distributed.programs import distribute

A = np.arange(24, dtype="float32").reshape(4, 6) / 8 - 1  # exact in binary, as sums of it are
B = A[::-1].copy() * 3
LAYOUTS = ("last", "first", "replicated", "pending")


def run_idioms(idioms, strategy, layouts=LAYOUTS):
    """Each of `idioms` gives on two ranks what it gives on one device, in each of `layouts`.

    An idiom takes a function that makes a tensor of an array: a plain one, or a sharded one.
    """

    def program(rank):
        distribute((1, 2), strategy=strategy)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of torch, about sparse and nested tensors
            for idiom in idioms:
                expected = _plain(idiom(torch.tensor))
                for layout in layouts:
                    found = _plain(idiom(lambda array, layout=layout: make(array, layout)))
                    assert_same(found, expected, f"{idiom.__name__} on {layout!r}, rank {rank}")

    run_ranks(program, 2)


def make(array, layout):
    """A sharded tensor with the values of `array`; a pending one is the sum of two parts."""
    value = torch.as_tensor(array)
    if layout == "pending" and value.dtype.is_floating_point:
        parts = torch.stack([value * 0.25, value * 0.75])
        return shardcore.distribute_tensor(parts, ("model",) + (None,) * value.ndim).sum(0)
    axes = [None] * value.ndim
    if value.ndim and layout in ("last", "first"):
        axes[-1 if layout == "last" else 0] = "model"
    return shardcore.distribute_tensor(value, tuple(axes))


def _plain(result):
    if isinstance(result, tuple | list):
        return [_plain(each) for each in result]
    if not isinstance(result, torch.Tensor):
        return result
    value = result.full_tensor() if isinstance(result, ShardedTensor) else result
    value = value.detach()
    return value if value.layout is torch.strided else value.to_dense()


def assert_same(found, expected, name):
    if isinstance(expected, list):
        assert len(found) == len(expected), name
        for one, other in zip(found, expected, strict=True):
            assert_same(one, other, name)
    elif isinstance(expected, torch.Tensor):
        torch.testing.assert_close(found, expected, msg=lambda text: f"{name}: {text}")
    else:
        assert found == expected, f"{name}: {found!r}, and on one device {expected!r}"
