"""The contenders, and the goals that they are measured against."""

from collections.abc import Callable

from attrs import frozen

from benchmarks.lanes import Lane

PEERS = {"data parallel": "DDP", "megatron": "parallelize_module", "fully sharded": "fully_shard"}
KERAS, HAND, JAX = "Keras", "torch by hand", "Keras on JAX"
INSTALLED = "Keras, shardcore installed"
SUMS = "the all-reduces alone, megatron"
EAGER, CAPTURED, INDUCTOR = "shardcore eager", "shardcore captured", "shardcore Inductor"


@frozen
class Goal:
    """A contender to be compared with, and the ratio that is not to be passed."""

    against: str
    limit: float | None = None


@frozen
class Contender:
    """A way to train.

    Attributes:
        name: What it is called in the table.
        open_lane: Starts it, given a case and a device; with `maps`, to count its memory.
        goals: What it is compared with.
        captured: Whether its step is to be a replay: no layer is called in Python.
    """

    name: str
    open_lane: Callable[..., Lane]
    goals: tuple[Goal, ...] = ()
    captured: bool = False
