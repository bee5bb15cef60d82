import pytest

from shardcore.domain.errors import MeshError
from shardcore.domain.layouts.mesh import Mesh
from shardcore.ports.world import World

MESH = Mesh((2, 2), ("data", "model"))


def test_position_is_the_place_in_the_mesh_not_the_process():
    worlds = [World(MESH, (3, 1, 0, 2), process, "cpu") for process in range(4)]
    assert [world.position for world in worlds] == [2, 1, 3, 0]


@pytest.mark.parametrize("processes", [(0, 1, 2), (0, 1, 2, 2), (0, 1, 2, 3, 4)])
def test_a_mesh_takes_each_process_once(processes):
    with pytest.raises(MeshError, match="needs 4 different processes"):
        World(MESH, processes, 0, "cpu")


def test_a_process_outside_the_mesh_is_named():
    with pytest.raises(MeshError, match="Process 7 is not in mesh"):
        World(MESH, (0, 1, 2, 3), 7, "cpu")
