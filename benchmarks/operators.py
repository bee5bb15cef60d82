"""The CPU time of single operators on small sharded tensors, beside what torch itself needs.

A tensor subclass in Python that does nothing else is the floor: torch calls Python for each
operator, and Python makes the tensor that comes back.
"""

import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import keras
import numpy as np
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import shardcore
from benchmarks.rows import Row
from shardcore.adapters import torch_private
from shardcore.testing import run_ranks

CALLS = 1000
FLOOR = "subclass that does nothing else"
OURS = "shardcore"
TIMEOUT = 300.0
OPERATORS: dict[str, Callable[[Any], Any]] = {
    "x + x": lambda x: x + x,
    "x * 2": lambda x: x * 2.0,
    "relu": torch.relu,
    "x @ x.T": lambda x: x @ x.T,
    "view": lambda x: x.view(-1),
    "sum of rows": lambda x: x.sum(1),
}


class Subclass(torch.Tensor):
    """The least that a tensor subclass does: unwrap, compute, wrap."""

    part: torch.Tensor
    __torch_function__ = torch_private.NO_TORCH_FUNCTION

    @staticmethod
    def __new__(cls, part: torch.Tensor) -> "Subclass":
        wrapper: Subclass = torch_private.wrapper(
            cls, part.shape, part.stride(), part.dtype, part.device
        )
        wrapper.part = part
        return wrapper

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        return cls(func(*[arg.part if type(arg) is cls else arg for arg in args]))


def rows(quick: bool, strategy: str, rounds: int) -> Iterator[Row]:
    """Yields the time of a thousand calls of each operator."""
    found = run_ranks(
        _measure, 2, strategy, CALLS // 10 if quick else CALLS, rounds, timeout=TIMEOUT
    )
    for operator, times in found[0].items():
        section = f"a thousand times {operator}, CPU time"
        for contender, seconds in times.items():
            against = "" if contender == "torch" else FLOOR
            ratio = seconds / times[FLOOR] if against else None
            yield Row(section, contender, seconds, against=against, ratio=ratio)


def _measure(rank: int, strategy: str, calls: int, rounds: int) -> dict[str, dict[str, float]]:
    values = np.ones((8, 16), "float32")
    own = init_device_mesh("cpu", (2,), mesh_dim_names=("own",))
    contenders = {
        "torch": torch.tensor(values),
        FLOOR: Subclass(torch.tensor(values)),
        "DTensor of torch": distribute_tensor(torch.tensor(values), own, [Shard(0)]),
    }
    shardcore.install(strategy)
    mesh = keras.distribution.DeviceMesh((2,), ["batch"])
    keras.distribution.set_distribution(
        keras.distribution.DataParallel(mesh, auto_shard_dataset=False)
    )
    contenders[OURS] = shardcore.distribute_tensor(values, ("batch", None))
    return {
        name: {
            contender: _seconds(operator, x, calls, rounds) for contender, x in contenders.items()
        }
        for name, operator in OPERATORS.items()
    }


def _seconds(operator: Callable[[Any], Any], x: Any, calls: int, rounds: int) -> float:
    """Returns the CPU seconds of this thread for a thousand calls: the median of some rounds."""
    for _ in range(calls // 5):
        operator(x)
    seconds = []
    for _ in range(rounds):
        began = time.thread_time()
        for _ in range(calls):
            operator(x)
        seconds.append((time.thread_time() - began) * CALLS / calls)
    return statistics.median(seconds)
