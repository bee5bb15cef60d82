"""The strategy that the matrices run under: `dtensor`, or what `--strategy` says."""

import os
from typing import Any

import torch

from shardcore.adapters.dtensor import DTensors
from shardcore.adapters.slices.library import SlicedTensors
from shardcore.adapters.slices.tensor import Slice
from shardcore.ports.tensors import ShardedTensors
from shardcore.ports.world import World

VARIABLE = "SHARDCORE_MATRIX_STRATEGY"
LIBRARIES: dict[str, Any] = {"dtensor": DTensors, "manual": SlicedTensors}


def name() -> str:
    """What `shardcore.install` is told. Ranks are forked, and inherit it."""
    return os.environ.get(VARIABLE, "dtensor")


def tensors(world: World) -> ShardedTensors:
    """The strategy's own library of sharded tensors."""
    library: ShardedTensors = LIBRARIES[name()](world)
    return library


def is_sharded(tensor: Any) -> bool:
    """Whether `tensor` is of that library."""
    return isinstance(tensor, Slice | torch.distributed.tensor.DTensor)


def local(tensor: Any) -> torch.Tensor:
    """What this rank stores of a sharded tensor."""
    return tensor.part if isinstance(tensor, Slice) else tensor.to_local()


def mesh_size(tensor: Any) -> int:
    """The ranks that a sharded tensor lies on."""
    if isinstance(tensor, Slice):
        return tensor.world.mesh.size
    return int(tensor.device_mesh.size())


def whole(tensor: Any) -> torch.Tensor:
    """The whole value of a sharded tensor."""
    if isinstance(tensor, Slice):
        return SlicedTensors(tensor.world).whole(tensor)
    return tensor.detach().full_tensor()
