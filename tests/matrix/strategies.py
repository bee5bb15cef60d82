"""The strategy that the matrices run under: `dtensor`, or what `--strategy` says."""

import os
from typing import Any

import torch

from shardcore.adapters.engine.tensor import ShardedTensor
from shardcore.builtin_plugins import shardcore_strategies
from shardcore.ports.strategy import ShardedTensors
from shardcore.ports.world import World

VARIABLE = "SHARDCORE_MATRIX_STRATEGY"


def name() -> str:
    """The strategy that `shardcore.install` gets. Ranks are forked, and inherit it."""
    return os.environ.get(VARIABLE, "dtensor")


def tensors(world: World) -> ShardedTensors:
    """The strategy's own library of sharded tensors."""
    entry = next(each for each in shardcore_strategies() if each.name == name())
    library: ShardedTensors = entry.open(world).tensors  # type: ignore[attr-defined]
    return library


def is_sharded(tensor: Any) -> bool:
    """Returns whether `tensor` is a sharded tensor of the strategy."""
    return isinstance(tensor, ShardedTensor)


def local(tensor: Any) -> torch.Tensor:
    """The local shard of a sharded tensor."""
    part: torch.Tensor = tensor.detach().to_local()
    return part


def mesh_size(tensor: Any) -> int:
    """The ranks of the mesh of a sharded tensor."""
    return int(tensor.engine.world.mesh.size)


def whole(tensor: Any) -> torch.Tensor:
    """The full tensor of a sharded tensor."""
    full: torch.Tensor = tensor.detach().full_tensor()
    return full
