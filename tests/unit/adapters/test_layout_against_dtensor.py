"""The local shapes and offsets of every rank are those that DTensor itself computes.

Only arithmetic is compared: no process group is needed.
"""

from types import SimpleNamespace

import torch
from hypothesis import example, given, settings
from torch.distributed import tensor as dtensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec, ShardOrderEntry
from torch.distributed.tensor._utils import _compute_local_shape_and_global_offset

from shardcore.domain.layouts import placements
from shardcore.domain.layouts.layout import Layout
from shardcore.domain.layouts.mesh import Mesh
from tests.unit.domain.generators import layouts_and_shapes

THREE_AXES = Mesh((2, 3, 2), ("data", "model", "expert"))
UNEVEN = (Layout(THREE_AXES, (("data", "model", "expert"), None)), (7, 5))
REORDERED = (Layout(THREE_AXES, (("expert", "model"), "data")), (7, 5))


def in_torch(placement):
    match placement:
        case placements.Shard(dim):
            return dtensor.Shard(dim)
        case placements.Partial(op):
            return dtensor.Partial(op)
    return dtensor.Replicate()


def assert_as_in_torch(layout, shape, torch_placements):
    for rank in range(layout.mesh.size):
        at = list(layout.mesh.coordinate(rank))
        local_shape, offset = _compute_local_shape_and_global_offset(
            shape, layout.mesh.shape, at, torch_placements
        )
        starts = tuple(each.start for each in layout.slices(shape, rank))
        assert (layout.local_shape(shape, rank), starts) == (
            tuple(local_shape),
            offset,
        )


@settings(max_examples=200)
@given(layouts_and_shapes())
@example(UNEVEN)
def test_mesh_order_is_the_arithmetic_of_dtensor(case):
    layout, shape = case
    # DTensor applies its placements from left to right: any layout of the same placements.
    layout = Layout.from_placements(layout.mesh, layout.placements, len(shape))
    assert_as_in_torch(layout, shape, tuple(map(in_torch, layout.placements)))


@settings(max_examples=200)
@given(layouts_and_shapes(pending=False))
@example(REORDERED)
def test_any_order_is_the_shard_order_of_dtensor_when_shardings_are_even(case):
    # _StridedShard, which says a shard order in placements, is another rule when they are not.
    layout, factors = case
    shape = tuple(factor * layout.mesh.size for factor in factors)
    index = layout.mesh.axis_names.index
    order = tuple(
        ShardOrderEntry(dim, tuple(map(index, layout.dim_axes(dim))))
        for dim in range(layout.ndim)
        if layout.dim_axes(dim)
    )
    mesh = SimpleNamespace(size=lambda axis: layout.mesh.shape[axis])
    plain = tuple(map(in_torch, layout.placements))
    strided = DTensorSpec._convert_shard_order_to_StridedShard(order, plain, mesh)
    assert_as_in_torch(layout, shape, strided)


@settings(max_examples=200)
@given(layouts_and_shapes(pending=False))
@example(REORDERED)
def test_any_order_is_dtensors_sharding_of_a_shard(case):
    layout, shape = case
    full = torch.arange(torch.Size(shape).numel()).reshape(shape)
    for rank in range(layout.mesh.size):
        at = dict(zip(layout.mesh.axis_names, layout.mesh.coordinate(rank), strict=True))
        part = full
        for dim in range(layout.ndim):
            for axis in layout.dim_axes(dim):
                parts = layout.mesh.axis_size(axis)
                shards, _ = dtensor.Shard(dim)._split_tensor(part, parts, with_padding=False)
                part = shards[at[axis]]
        torch.testing.assert_close(full[layout.slices(shape, rank)], part, rtol=0, atol=0)
