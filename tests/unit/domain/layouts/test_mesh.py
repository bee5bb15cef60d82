import numpy as np
import pytest
from hypothesis import given

from shardcore.domain.errors import MeshError, ShardcoreError
from shardcore.domain.layouts.mesh import Mesh
from tests.unit.domain.generators import meshes

MESH = Mesh((2, 3), ("data", "model"))


@given(meshes)
def test_ranks_are_row_major_positions(mesh):
    grid = np.arange(mesh.size).reshape(mesh.shape)
    assert mesh.size == grid.size
    assert mesh.ndim == grid.ndim
    for at in np.ndindex(*mesh.shape):
        assert mesh.coordinate(int(grid[at])) == at


@given(meshes)
def test_an_axis_group_is_a_line_of_the_grid(mesh):
    grid = np.arange(mesh.size).reshape(mesh.shape)
    for i, axis in enumerate(mesh.axis_names):
        lines = np.moveaxis(grid, i, -1).reshape(-1, mesh.shape[i])
        assert mesh.axis_groups(axis) == tuple(map(tuple, lines.tolist()))
        for line in lines.tolist():
            assert all(mesh.axis_group(axis, rank) == tuple(line) for rank in line)


def test_any_sequence_of_integers_and_names_will_do():
    mesh = Mesh([np.int64(2), 3], axis_names=["data", "model"])
    assert mesh == MESH
    assert hash(mesh) == hash(MESH)
    assert str(mesh) == "(data=2, model=3)"


def test_axes_are_found_by_name():
    assert MESH.axis_index("model") == 1
    assert MESH.axis_size("model") == 3
    with pytest.raises(MeshError, match=r"no axis 'modle': its axes are \('data', 'model'\)"):
        MESH.axis_index("modle")


@pytest.mark.parametrize(
    ("shape", "names", "message"),
    [
        ((2, 2), ("data", "data"), "'data' occurs twice"),
        ((2, 0), ("data", "model"), "size 0"),
        ((2, -1), ("data", "model"), "size -1"),
        ((2, True), ("data", "model"), "size True"),
        ((2, 2.0), ("data", "model"), "size 2.0"),
        ((2, "2"), ("data", "model"), "size '2'"),
        ((2,), ("data", "model"), r"\(2,\) has 1 axes but axis_names \('data', 'model'\) has 2"),
        ((), (), "at least one axis"),
        ((2,), ("",), "name ''"),
        ((2,), (1,), "name 1"),
        ((2,), "d", "axis_names must be a sequence, got 'd'"),
        (2, ("data",), "shape must be a sequence, got 2"),
    ],
)
def test_a_mesh_that_cannot_be_is_an_error_with_the_name(shape, names, message):
    with pytest.raises(MeshError, match=message) as caught:
        Mesh(shape, names)
    assert isinstance(caught.value, ShardcoreError)
    assert isinstance(caught.value, ValueError)


@pytest.mark.parametrize("rank", [-1, 6, True, 1.0, "0"])
def test_a_rank_outside_the_mesh_is_an_error(rank):
    with pytest.raises(MeshError, match=str(rank)):
        MESH.coordinate(rank)
