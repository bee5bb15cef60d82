"""Every layout of an operand on a mesh, and a value in it."""

from collections.abc import Iterator, Sequence

import numpy as np
import torch

from shardcore.domain.layouts.layout import Layout
from shardcore.domain.layouts.mesh import Mesh
from shardcore.ports.strategy import ShardedTensors
from shardcore.ports.world import World

MESHES = {"(2,)": Mesh((2,), ("data",)), "(2, 2)": Mesh((2, 2), ("data", "model"))}
PENDING = -1  # in a choice of dims: no dim is sharded, the value is a partial sum


def layouts(mesh: Mesh, value: np.ndarray) -> Iterator[Layout]:
    """The layouts in which `value` is tried, without the replicated one.

    On one axis each dim is sharded, and the sum pending. On two, what one axis alone does not show:
    a dim sharded by both, two dims sharded, and a partial sum beside a sharded dim or another sum.
    """
    dims = range(value.ndim)
    pending = [PENDING] if value.dtype != bool else []
    if mesh.ndim == 1:
        yield from (layout(mesh, (choice,), value.ndim) for choice in (*dims, *pending))
        return
    pairs = [(dim, dim) for dim in dims]
    pairs += [(dim, (dim + 1) % value.ndim) for dim in dims if value.ndim > 1]
    pairs += [pair for each in pending for pair in [(each, each), *((dim, each) for dim in dims)]]
    yield from (layout(mesh, pair, value.ndim) for pair in pairs)


def layout(mesh: Mesh, choice: Sequence[int | None], ndim: int) -> Layout:
    """Each axis shards the dim chosen for it, leaves a sum pending, or does nothing (None)."""
    spec = tuple(
        tuple(axis for axis, at in zip(mesh.axis_names, choice, strict=True) if at == dim)
        for dim in range(ndim)
    )
    pending = {a: "sum" for a, at in zip(mesh.axis_names, choice, strict=True) if at == PENDING}
    return Layout(mesh, spec, pending)


def assignments(mesh: Mesh, values: Sequence[np.ndarray]) -> Iterator[tuple[Layout | None, ...]]:
    """Layouts of all operands: all alike as far as they can, then one operand at a time."""
    if not values:
        yield ()
        return
    yield tuple(Layout.replicated(mesh, value.ndim) for value in values)
    largest = max(values, key=lambda value: value.ndim)
    for each in layouts(mesh, largest):
        yield tuple(_fitted(each, value) for value in values)
    if len(values) == 1:
        return
    # A plain tensor beside sharded ones is promoted: the others stay plain here.
    for at, value in enumerate(values):
        for each in layouts(mesh, value):
            yield tuple(each if k == at else None for k in range(len(values)))


def _fitted(wanted: Layout, value: np.ndarray) -> Layout:
    """`wanted` for an operand of fewer dims, or one that cannot be pending."""
    spec = tuple(wanted.spec[dim] if dim < wanted.ndim else None for dim in range(value.ndim))
    return Layout(wanted.mesh, spec, () if value.dtype == bool else wanted.partial)


def place(
    tensors: ShardedTensors, world: World, value: np.ndarray, wanted: Layout | None
) -> torch.Tensor:
    """`value` in the layout; plain if there is none."""
    if wanted is None:
        return torch.tensor(value)
    part = value[wanted.slices(value.shape, world.position)]
    for axis, _ in wanted.partial:
        part = part * 2 if _coordinate(world, axis) == 0 else -part
        # The last rank of a larger axis would be counted again.
        assert wanted.mesh.axis_size(axis) == 2
    return tensors.from_local(torch.tensor(np.array(part)), wanted, value.shape)


def _coordinate(world: World, axis: str) -> int:
    mesh = world.mesh
    return mesh.coordinate(world.position)[mesh.axis_index(axis)]
