import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardcore.domain.errors import LayoutError, MeshError
from shardcore.domain.layout import Layout
from shardcore.domain.mesh import Mesh
from shardcore.domain.placements import Partial, Replicate, Shard
from tests.unit.domain.generators import layouts_and_shapes
from tests.unit.domain.numpy_mesh import coordinates, scatter

MESH = Mesh((2, 2), ("data", "model"))


@given(layouts_and_shapes(pending=False))
def test_slices_are_the_chunks_of_chunks(case):
    layout, shape = case
    whole = np.arange(np.prod(shape, dtype=int)).reshape(shape)
    for rank, (at, part) in enumerate(scatter(layout, whole).items()):
        assert layout.mesh.coordinate(rank) == at
        np.testing.assert_array_equal(whole[layout.slices(shape, rank)], part)
        assert layout.local_shape(shape, rank) == part.shape
        starts = tuple(s.start for s in layout.slices(shape, rank))
        assert layout.global_offset(shape, rank) == starts


@given(layouts_and_shapes(pending=False))
def test_every_element_is_held_once_per_replica(case):
    layout, shape = case
    holders = np.zeros(shape, dtype=int)
    for rank in range(layout.mesh.size):
        holders[layout.slices(shape, rank)] += 1
    whole_axes = [p == Replicate() for p in layout.placements]
    replicas = np.prod(np.where(whole_axes, layout.mesh.shape, 1))
    assert (holders == replicas).all()


def test_an_empty_shard_begins_at_the_end_of_its_dim():
    layout = Layout(Mesh((4,), ("data",)), ("data", None))
    assert [layout.local_shape((5, 3), rank) for rank in range(4)] == [
        (2, 3),
        (2, 3),
        (1, 3),
        (0, 3),
    ]
    assert layout.global_offset((5, 3), rank=3) == (5, 0)
    assert layout.slices((5, 3), rank=3) == (slice(5, 5), slice(0, 3))


def test_the_first_axis_of_a_dim_is_the_major():
    data_major = Layout(MESH, (("data", "model"),))
    model_major = Layout(MESH, (("model", "data"),))
    assert [data_major.global_offset((8,), rank) for rank in range(4)] == [(0,), (2,), (4,), (6,)]
    assert [model_major.global_offset((8,), rank) for rank in range(4)] == [(0,), (4,), (2,), (6,)]
    assert data_major.placements == model_major.placements == (Shard(0), Shard(0))
    assert data_major.shard_order == ()
    assert model_major.shard_order == ((0, ("model", "data")),)


@given(layouts_and_shapes())
def test_placements_and_order_say_all_of_a_layout(case):
    layout, shape = case
    back = Layout.from_placements(layout.mesh, layout.placements, len(shape), layout.shard_order)
    assert back == layout
    assert hash(back) == hash(layout)


@given(layouts_and_shapes(), st.data())
def test_a_layout_says_all_of_its_placements(case, data):
    layout, shape = case
    ndim = len(shape)
    placements = []
    for placement in layout.placements:
        negative = isinstance(placement, Shard) and data.draw(st.booleans())
        placements.append(Shard(placement.dim - ndim) if negative else placement)
    back = Layout.from_placements(layout.mesh, placements, ndim)
    assert back.placements == layout.placements
    assert back.shard_order == ()


def test_placements_give_a_spec():
    mesh = Mesh((2, 2, 2), ("data", "model", "expert"))
    placements = (Shard(-1), Partial("avg"), Shard(1))
    layout = Layout.from_placements(mesh, placements, ndim=2)
    assert layout == Layout(mesh, (None, ("data", "expert")), {"model": "avg"})
    assert layout.dim_axes(0) == ()
    assert layout.dim_axes(1) == ("data", "expert")
    assert layout.placement("model") == Partial("avg")


@pytest.mark.parametrize(
    ("placements", "ndim", "order", "message"),
    [
        ((Replicate(), Shard(2)), 2, (), "Axis 'model' shards dim 2, but the tensor has 2 dims"),
        ((Shard(-3), Replicate()), 2, (), "Axis 'data' shards dim -3"),
        ((Shard(0), Replicate()), 0, (), "Axis 'data' shards dim 0, but the tensor has 0 dims"),
        ((Replicate(),), 2, (), "takes 2 placements, one per axis, got 1"),
        ((Shard(0), Shard(0)), 1, ((0, ("model",)),), r"splits dim 0 by \('model',\)"),
        ((Shard(0), Shard(0)), 1, ((1, ("model", "data")),), "dim 1 by"),
        ((Replicate(), Shard(0)), 1, ((0, ("model", "data")),), r"split it by \('model',\)"),
    ],
)
def test_placements_that_cannot_be_are_errors(placements, ndim, order, message):
    with pytest.raises(LayoutError, match=message):
        Layout.from_placements(MESH, placements, ndim, order)


def test_a_spec_is_normalised():
    layout = Layout(MESH, [(), ("data",), [None], None], partial={"model": "sum"})
    assert layout.spec == (None, "data", None, None)
    assert layout == Layout(MESH, (None, "data", None, None), (("model", "sum"),))
    assert layout.ndim == 4


def test_a_layout_reads_well():
    assert str(Layout(MESH, (None, "model"))) == "(None, 'model')"
    pending = Layout(MESH, (), {"model": "avg", "data": "sum"})
    assert str(pending) == "() with sum over 'data', avg over 'model'"


@pytest.mark.parametrize(
    ("spec", "partial", "message"),
    [
        (("data", "data"), {}, "axis 'data' twice"),
        ((("data", "data"),), {}, "axis 'data' twice"),
        (("data",), {"data": "sum"}, "axis 'data' twice"),
        (("modle",), {}, r"axis 'modle', but the axes of its mesh are \('data', 'model'\)"),
        ((None,), {"modle": "sum"}, "axis 'modle'"),
        ((1,), {}, "tuple of axis names, got 1"),
        (((("data", None)),), {}, r"tuple of axis names, got \('data', None\)"),
        ("data", {}, "one entry per tensor dim, got 'data'"),
        ((None,), {"data": "mean"}, "reduction 'mean'"),
        ((None,), {"data": "sum", "model": "max"}, "mixes reductions"),
    ],
)
def test_a_layout_that_cannot_be_is_an_error_with_the_name(spec, partial, message):
    with pytest.raises(LayoutError, match=message):
        Layout(MESH, spec, partial)


def test_a_shape_of_other_dims_is_an_error_that_names_both():
    for question in (Layout.local_shape, Layout.global_offset, Layout.slices):
        with pytest.raises(LayoutError, match=r"\(None, 'model'\).* 2 dims, got shape \(3,\)"):
            question(Layout(MESH, (None, "model")), (3,), rank=0)


def test_replicated():
    layout = Layout.replicated(MESH, 2)
    assert layout.spec == (None, None)
    assert layout.is_replicated
    assert not Layout(MESH, (None, "model")).is_replicated
    assert not Layout(MESH, (None,), {"model": "sum"}).is_replicated


def test_without_axes_is_the_layout_of_use():
    storage = Layout(MESH, (("model", "data"), None))
    assert storage.without("data") == Layout(MESH, ("model", None))
    assert storage.without("data", "model") == Layout.replicated(MESH, 2)
    assert storage.without() == storage
    pending = Layout(MESH, ("data",), {"model": "sum"})
    assert pending.without("data", "model") == Layout(MESH, (None,), {"model": "sum"})
    with pytest.raises(MeshError, match="no axis 'batch'"):
        storage.without("batch")


def test_a_mesh_of_one_rank_holds_all():
    layout = Layout(Mesh((1, 1), ("data", "model")), (("model", "data"), None))
    assert coordinates(layout.mesh) == [(0, 0)]
    assert layout.slices((3, 0), rank=0) == (slice(0, 3), slice(0, 0))
