"""Resharding: ranks read in one layout what others have stored in another."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from shardcore.domain.checkpoints.contents import VariableToStore, divide, pieces_of_rank
from shardcore.domain.checkpoints.grid import Box, Grid, consecutive_runs, held_parts, holders
from shardcore.domain.layouts.layout import Layout
from shardcore.domain.layouts.mesh import Mesh
from shardcore.domain.layouts.placements import Segments
from tests.unit.domain.generators import layouts, meshes, shapes


def shard(layout, value, rank):
    """Cuts what a rank holds, by the layout itself."""
    return value[layout.slices(value.shape, rank)]


@st.composite
def pairs(draw):
    shape = draw(shapes)
    both = [draw(layouts(draw(meshes), len(shape), pending=False, blocks=True)) for _ in range(2)]
    return *both, shape


@given(pairs())
@settings(deadline=None)
def test_every_layout_reads_what_every_layout_has_stored(case):
    source, target, shape = case
    value = np.arange(1, np.prod(shape, dtype=int) + 1).reshape(shape)
    stored = divide([VariableToStore("v", "v", "model", shape, "int64", source)])[0]
    files = {
        piece.key: np.ascontiguousarray(shard(source, value, rank)[piece.local.slices])
        for rank in range(source.mesh.size)
        for piece in pieces_of_rank([(stored, source)], rank)
    }
    boxes = list(stored.grid.boxes())
    for rank in range(target.mesh.size):
        local = np.zeros(target.local_shape(shape, rank), value.dtype)
        for part in held_parts(target, shape, rank):
            for number, common in stored.grid.overlaps(part.full):
                begin = common.within(part.full).start
                start = tuple(a + b for a, b in zip(begin, part.local.start, strict=True))
                source_box, place = common.within(boxes[number]), Box(start, common.shape)
                flat = files[stored.key(boxes[number])].reshape(-1)
                for at, to, count in consecutive_runs(
                    boxes[number].shape, source_box, local.shape, place
                ):
                    local.reshape(-1)[to : to + count] = flat[at : at + count]
        np.testing.assert_array_equal(local, shard(target, value, rank))
        assert (local > 0).all()


@given(pairs())
@settings(deadline=None)
def test_each_element_is_written_once_by_a_rank_that_holds_it(case):
    layout, _, shape = case
    stored = divide([VariableToStore("v", "v", "model", shape, "int8", layout)])[0]
    written = np.zeros(shape, int)
    for number, box in enumerate(stored.grid.boxes()):
        written[box.slices] += 1
        if box.elements:
            assert stored.files[number] in holders(layout, stored.grid)[number]
    assert (written == 1).all()
    keys = [
        piece.key
        for rank in range(layout.mesh.size)
        for piece in pieces_of_rank([(stored, layout)], rank)
    ]
    assert len(keys) == len(set(keys)) == sum(box.elements > 0 for box in stored.grid.boxes())


def test_a_dim_in_segments_has_a_piece_in_each():
    layout = Layout(Mesh((2,), ("model",)), ("model",), blocks=(Segments(3),))
    assert Grid.of(layout, (12,)).cuts == ((0, 2, 4, 6, 8, 10),)
    assert [part.full.start for part in held_parts(layout, (12,), 1)] == [(2,), (6,), (10,)]
    assert [part.local.start for part in held_parts(layout, (12,), 1)] == [(0,), (2,), (4,)]


def test_ranks_share_the_writing_of_replicated_variables():
    layout = Layout(Mesh((2, 2), ("data", "model")), (None, "model"))
    variables = divide(
        VariableToStore(str(n), "", "model", (8, 8), "float32", layout) for n in range(8)
    )
    loads = [0] * 4
    for each in variables:
        for file, box in zip(each.files, each.grid.boxes(), strict=True):
            loads[file] += box.elements * 4
    assert loads == [8 * 8 * 8 * 4 // 4] * 4
