"""The redistributions of DTensor, in the words of the domain."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch

from shardcore.adapters.dtensor_placements import from_torch
from shardcore.adapters.torch_compat.dtensor import redistributions
from shardcore.domain.layout import Layout
from shardcore.domain.mesh import Mesh
from shardcore.ports.whereabouts import Move, moving


@contextmanager
def told() -> Iterator[None]:
    """Inside, `current_move` knows of them."""
    with redistributions.around_redistributions(_move):
        yield


def _move(local: torch.Tensor, current: Any, target: Any) -> AbstractContextManager[None]:
    return moving(Move(local, tuple(current.shape), _layout(current), _layout(target)))


def _layout(spec: Any) -> Layout:
    """The order of axes that split one dim is not told: what is moved along each of them is."""
    mesh = Mesh(tuple(spec.mesh.shape), tuple(spec.mesh.mesh_dim_names))
    return Layout.from_placements(mesh, map(from_torch, spec.placements), len(spec.shape))
