"""Operators that have other results or another gradient on CUDA.

Without a GPU stand-ins on the CPU compute them.
"""

from contextlib import nullcontext

import numpy as np
import torch
from torch.nn import functional

import shardcore
from shardcore.testing import count_collectives, run_ranks
from tests import cuda_operators
from tests.distributed.programs import (
    DEVICE,
    IS_ON_GPU,
    as_arrays,
    assert_close,
    distribute,
    placements,
)
from tests.fallbacks import fallbacks

RNG = np.random.default_rng(0)
X, GRADIENT = (RNG.normal(size=(7, 6)).astype("float32") for _ in range(2))
WEIGHT = RNG.normal(size=6).astype("float32")
aten = torch.ops.aten


def log_sigmoid(x):
    """As on CUDA, its buffer is empty."""
    return -functional.softplus(-x), x.new_empty(0)


def log_sigmoid_backward(gradient, x, buffer):
    assert buffer.shape == (0,)
    return gradient * (-x).sigmoid()


def rms_norm_backward(gradient, x, shape, root, weight, _wanted):
    assert shape == [6]
    assert root.shape == (*x.shape[:-1], 1)
    scaled, unit = gradient * weight, x * root
    of_x = root * (scaled - unit * (scaled * unit).mean(-1, keepdim=True))
    return of_x, (gradient * unit).sum(0)


FUNCTIONS = {
    "log_sigmoid_forward": log_sigmoid,
    "log_sigmoid_backward": log_sigmoid_backward,
    "_fused_rms_norm_backward": rms_norm_backward,
}


def tensors():
    return [torch.tensor(each, device=DEVICE) for each in (X, GRADIENT, WEIGHT)]


def one_device(rank):
    x, gradient, weight = tensors()
    x.requires_grad_(), weight.requires_grad_()
    logs = functional.logsigmoid(x)
    (of_logs,) = torch.autograd.grad(logs, x, gradient)
    normed = functional.rms_norm(x, (6,), weight, 1e-6)
    of_x, of_weight = torch.autograd.grad(normed, (x, weight), gradient)
    return as_arrays({"logs": logs, "of logs": of_logs, "of x": of_x, "of weight": of_weight})


def over_ranks(rank):
    distribute((2, 1))
    specs = ("data", None), ("data", None), (None,)
    x, gradient, weight = map(shardcore.distribute_tensor, tensors(), specs)
    root = (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt()
    stand_ins = nullcontext() if IS_ON_GPU else cuda_operators.on_cpu(FUNCTIONS, {})
    with stand_ins as calls, count_collectives() as traffic:
        trained = x.clone().requires_grad_()
        logs = functional.logsigmoid(trained)
        (of_logs,) = torch.autograd.grad(logs, trained, gradient)
        of_x, of_weight = aten._fused_rms_norm_backward(
            gradient, x, [6], root, weight, [True, True]
        )
    found = {"logs": logs, "of logs": of_logs, "of x": of_x, "of weight": of_weight}
    places = {name: placements(each) for name, each in found.items()}
    shapes = [shape for _, shape in calls or ()]
    return as_arrays(found), places, dict(traffic.calls), shapes, fallbacks()


def test_rows_stay_sharded_and_nothing_moves():
    sharding = {"logs": "S(0) R", "of logs": "S(0) R", "of x": "S(0) R", "of weight": "P(sum) R"}
    (expected,) = run_ranks(one_device, 1)
    for rank, (values, places, moved, shapes, fell_back) in enumerate(run_ranks(over_ranks, 2)):
        assert_close([values], expected)
        assert places == sharding
        assert moved == {}
        assert IS_ON_GPU or shapes == [(4 - rank, 6)] * 3
        assert not fell_back
