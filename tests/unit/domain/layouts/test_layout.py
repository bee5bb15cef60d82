import attrs
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardcore.domain.errors import LayoutError, MeshError
from shardcore.domain.layouts.chunks import chunk_sizes
from shardcore.domain.layouts.layout import Layout
from shardcore.domain.layouts.mesh import Mesh
from shardcore.domain.layouts.placements import Partial, Replicate, Segments, Shard
from shardcore.testing.simulated_ranks import chunks, coordinates, scatter
from tests.unit.domain.generators import block_sizes, layouts_and_shapes

MESH = Mesh((2, 2), ("data", "model"))
LINE = Mesh((2,), ("data",))


def starts(layout, shape):
    """The offset of each rank's shard in the global tensor."""
    ranks = range(layout.mesh.size)
    return [tuple(each.start for each in layout.slices(shape, rank)) for rank in ranks]


@given(layouts_and_shapes(pending=False, blocks=True))
def test_slices_are_the_chunks_of_chunks(case):
    layout, shape = case
    full = np.arange(np.prod(shape, dtype=int)).reshape(shape)
    for rank, (at, part) in enumerate(scatter(layout, full).items()):
        assert layout.mesh.coordinate(rank) == at
        np.testing.assert_array_equal(full[layout.slices(shape, rank)], part)
        assert layout.local_shape(shape, rank) == part.shape


@given(layouts_and_shapes(pending=False, blocks=True))
def test_every_element_is_held_once_per_replica(case):
    layout, shape = case
    holders = np.zeros(shape, dtype=int)
    for rank in range(layout.mesh.size):
        holders[layout.slices(shape, rank)] += 1
    replicated_axes = [p == Replicate() for p in layout.placements]
    replicas = np.prod(np.where(replicated_axes, layout.mesh.shape, 1))
    assert (holders == replicas).all()


def test_a_dim_in_blocks_is_sharded_between_blocks_only():
    layout = Layout(LINE, ("data", None), blocks=(4, 1))
    assert [layout.local_shape((20, 3), rank) for rank in range(2)] == [(12, 3), (8, 3)]
    assert starts(layout, (20, 3)) == [(0, 0), (12, 0)]
    # The last block may be smaller than others.
    assert [layout.local_shape((7, 3), rank) for rank in range(2)] == [(4, 3), (3, 3)]
    both = Layout(MESH, (("model", "data"),), blocks=(3,))
    assert [both.local_shape((20,), rank) for rank in range(4)] == [(6,), (6,), (6,), (2,)]
    assert starts(both, (20,)) == [(0,), (12,), (6,), (18,)]


@given(st.integers(0, 30), st.lists(st.integers(1, 4), max_size=3), st.integers(1, 9))
def test_sizes_of_chunks_are_those_of_the_chunks_of_chunks(size, ranks, block):
    parts = [np.arange(size)]
    for count in ranks:
        parts = [chunk for part in parts for chunk in chunks(part, count, 0, block)]
    assert chunk_sizes(size, tuple(ranks), block) == tuple(map(len, parts))


def parts_of_dims(layout, shape):
    """Per dim which of its elements each rank holds, by the chunks of NumPy."""
    dims = [
        Layout(layout.mesh, (entry,), blocks=(block,))
        for entry, block in zip(layout.spec, layout.blocks, strict=True)
    ]
    return [
        [part.tolist() for part in scatter(dim, np.arange(size)).values()]
        for dim, size in zip(dims, shape, strict=True)
    ]


@given(layouts_and_shapes(blocks=True))
def test_a_normalized_layout_gives_every_rank_the_same_elements(case):
    layout, shape = case
    normalized = layout.normalized(shape)
    for rank in range(layout.mesh.size):
        assert normalized.slices(shape, rank) == layout.slices(shape, rank)
    assert (normalized.spec, normalized.partial) == (layout.spec, layout.partial)
    assert normalized.normalized(shape) == normalized


@given(layouts_and_shapes(pending=False, blocks=True), st.data())
def test_normalized_blocks_are_equal_where_all_ranks_hold_the_same_and_nowhere_else(case, data):
    layout, shape = case
    blocks = [data.draw(block_sizes | st.integers(5, 12)) if e else 1 for e in layout.spec]
    other = Layout(layout.mesh, layout.spec, blocks=blocks)
    parts = zip(parts_of_dims(layout, shape), parts_of_dims(other, shape), strict=True)
    found = zip(layout.normalized(shape).blocks, other.normalized(shape).blocks, strict=True)
    assert [a == b for a, b in found] == [a == b for a, b in parts]


@pytest.mark.parametrize(
    ("size", "block", "normalized"),
    # The parts, beside the blocks that give them: the least one that divides the size, or else
    # the least one.
    [
        (20, 4, 4),  # 12, 8: 3, 4, 6, 12
        (24, 4, 1),  # 12, 12: 1, 2, 3, 4, 6, 12
        (12, 8, 4),  # 8, 4: 4, 8
        (9, 6, 3),  # 6, 3: 2, 3, 6
        (5, 4, 2),  # 4, 1: 2, 4
        (3, 4, 3),  # 3, 0: 3 and more
        (0, 4, 1),
    ],
)
def test_a_normalized_block_divides_the_dim_if_any_does_and_is_the_least(size, block, normalized):
    layout = Layout(LINE, ("data", None), blocks=(block, 1))
    assert layout.normalized((size, 2)).blocks == (normalized, 1)


def test_an_empty_shard_begins_at_the_end_of_its_dim():
    layout = Layout(Mesh((4,), ("data",)), ("data", None))
    assert [layout.local_shape((5, 3), rank) for rank in range(4)] == [
        (2, 3),
        (2, 3),
        (1, 3),
        (0, 3),
    ]
    assert layout.slices((5, 3), rank=3) == (slice(5, 5), slice(0, 3))


def test_the_first_axis_of_a_dim_is_the_major():
    data_major = Layout(MESH, (("data", "model"),))
    model_major = Layout(MESH, (("model", "data"),))
    assert starts(data_major, (8,)) == [(0,), (2,), (4,), (6,)]
    assert starts(model_major, (8,)) == [(0,), (4,), (2,), (6,)]
    assert data_major.placements == model_major.placements == (Shard(0), Shard(0))
    assert data_major.in_mesh_order
    assert not model_major.in_mesh_order


@given(layouts_and_shapes(blocks=True))
def test_placements_say_all_of_a_layout_in_the_order_of_the_mesh(case):
    layout, shape = case
    back = Layout.from_placements(layout.mesh, layout.placements, len(shape))
    assert (back == layout) == layout.in_mesh_order
    assert back != layout or hash(back) == hash(layout)


@given(layouts_and_shapes(blocks=True), st.data())
def test_a_layout_says_all_of_its_placements(case, data):
    layout, shape = case
    ndim = len(shape)
    placements = []
    for placement in layout.placements:
        negative = isinstance(placement, Shard) and data.draw(st.booleans())
        placements.append(
            attrs.evolve(placement, dim=placement.dim - ndim) if negative else placement
        )
    back = Layout.from_placements(layout.mesh, placements, ndim)
    assert back.placements == layout.placements
    assert back.in_mesh_order


def test_placements_give_a_spec():
    mesh = Mesh((2, 2, 2), ("data", "model", "expert"))
    placements = (Shard(-1), Partial("avg"), Shard(1))
    layout = Layout.from_placements(mesh, placements, ndim=2)
    assert layout == Layout(mesh, (None, ("data", "expert")), {"model": "avg"})
    assert layout.dim_axes(0) == ()
    assert layout.dim_axes(1) == ("data", "expert")
    assert layout.placement("model") == Partial("avg")


def test_placements_give_blocks():
    layout = Layout.from_placements(MESH, (Shard(-1, 4), Shard(1, block=4)), ndim=2)
    assert layout == Layout(MESH, (None, ("data", "model")), blocks=(1, 4))
    assert layout.blocks == (1, 4)
    assert layout.placements == (Shard(1, 4), Shard(1, 4))
    assert layout != Layout(MESH, (None, ("data", "model")))


@pytest.mark.parametrize(
    ("placements", "ndim", "message"),
    [
        ((Replicate(), Shard(2)), 2, "Axis 'model' shards dim 2, but the tensor has 2 dims"),
        ((Shard(-3), Replicate()), 2, "Axis 'data' shards dim -3"),
        ((Shard(0), Replicate()), 0, "Axis 'data' shards dim 0, but the tensor has 0 dims"),
        ((Replicate(),), 2, "takes 2 placements, one per axis, got 1"),
        ((Shard(0, 2), Shard(0, 4)), 1, "Dim 0 is sharded in blocks of 2 and of 4"),
        ((Shard(1), Shard(-1, 3)), 2, "Dim 1 is sharded in blocks of 1 and of 3"),
    ],
)
def test_placements_that_cannot_be_are_errors(placements, ndim, message):
    with pytest.raises(LayoutError, match=message):
        Layout.from_placements(MESH, placements, ndim)


def test_a_spec_is_normalised():
    layout = Layout(MESH, [(), ("data",), [None], None], partial={"model": "sum"})
    assert layout.spec == (None, "data", None, None)
    assert layout == Layout(MESH, (None, "data", None, None), (("model", "sum"),))
    assert layout.ndim == 4


def test_a_layout_reads_well():
    assert str(Layout(MESH, (None, "model"))) == "(None, 'model')"
    pending = Layout(MESH, (), {"model": "avg", "data": "sum"})
    assert str(pending) == "() with sum over 'data', avg over 'model'"
    in_blocks = Layout(MESH, ("data", None), {"model": "sum"}, (4, 1))
    assert str(in_blocks) == "('data', None) with sum over 'model' in blocks of (4, 1)"
    both = Layout(MESH, (("data", "model"), None), blocks=(Segments(6, 2, outer=1), 1))
    assert str(both) == "(('data', 'model'), None) in blocks of (6 (over 1 axis) x 2, 1)"
    pairs = Layout(MESH, (("data", "model"),), blocks=(Segments(6, 1, 2, 3),))
    assert str(pairs) == "(('data', 'model'),) in blocks of (6 (over 2 axes, 3 together) x 1)"


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
        ((None,), {"data": "sum", "model": "max"}, "whose results depend on the order"),
    ],
)
def test_a_layout_that_cannot_be_is_an_error_with_the_name(spec, partial, message):
    with pytest.raises(LayoutError, match=message):
        Layout(MESH, spec, partial)


@pytest.mark.parametrize(
    ("blocks", "message"),
    [
        ((0, 1), r"has blocks \(0, 1\): a sharded dim has blocks of 1 or more"),
        ((-4, 1), r"has blocks \(-4, 1\)"),
        ((4, 2), r"\('data', None\) in blocks of \(4, 2\) has .* any other of 1"),
        ((4,), r"needs one block per dim, got \(4,\)"),
        ((4, 1, 1), r"needs one block per dim, got \(4, 1, 1\)"),
    ],
)
def test_blocks_that_cannot_be_are_an_error(blocks, message):
    with pytest.raises(LayoutError, match=message):
        Layout(MESH, ("data", None), blocks=blocks)


def test_a_shape_of_other_dims_is_an_error_that_names_both():
    for question in (Layout.local_shape, Layout.slices):
        with pytest.raises(LayoutError, match=r"shape \(3,\), .*\(None, 'model'\) .* 2 dims"):
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


def test_without_axes_a_dim_that_is_still_sharded_keeps_its_blocks():
    storage = Layout(MESH, (("model", "data"), None), blocks=(4, 1))
    assert storage.without("data") == Layout(MESH, ("model", None), blocks=(4, 1))
    assert storage.without("data", "model") == Layout.replicated(MESH, 2)


def test_reduced_is_the_layout_with_nothing_pending():
    pending = Layout(MESH, ("data", None), {"model": "sum"}, (4, 1))
    assert pending.reduced == Layout(MESH, ("data", None), blocks=(4, 1))
    assert pending.reduced.reduced == pending.reduced


def test_a_mesh_of_one_rank_holds_all():
    layout = Layout(Mesh((1, 1), ("data", "model")), (("model", "data"), None))
    assert coordinates(layout.mesh) == [(0, 0)]
    assert layout.slices((3, 0), rank=0) == (slice(0, 3), slice(0, 0))
