"""A gradient is sharded as the results of its operator are, wherever its operands are."""

from hypothesis import given
from hypothesis import strategies as st

from shardcore.domain.engine.call import PlacedTensor
from shardcore.domain.engine.choice import shard_as
from shardcore.domain.engine.rules import layers
from shardcore.domain.layouts.layout import Layout
from shardcore.domain.layouts.mesh import Mesh
from tests.unit.domain.engine.rules.proof import in_blocks, meshes

BACKWARD = layers.recurrent_backward(True, (2,), False, (True, False, False), kept=1)
OUTPUT, BATCH = 2, 0


@given(st.data())
def test_the_operand_stays_and_the_others_follow(data):
    mesh, batch = data.draw(meshes), data.draw(st.sampled_from([6, 7, 12]))
    shapes = [(batch, 3, 2), (1, batch, 4), (batch, 3, 4), (batch, 3, 4), (5,), (2, 4)]

    def anywhere(shape, dims):
        places = [data.draw(st.sampled_from([None, *dims])) for _ in mesh.axis_names]
        spec = [
            tuple(axis for axis, at in zip(mesh.axis_names, places, strict=True) if at == dim)
            for dim in range(len(shape))
        ]
        return in_blocks(data, mesh, shape, Layout(mesh, spec).placements)

    operands = tuple(
        PlacedTensor(shape, anywhere(shape, [BATCH] if at == OUTPUT else range(len(shape))))
        for at, shape in enumerate(shapes)
    )
    sharding = shard_as(BACKWARD, operands, OUTPUT)
    output = operands[OUTPUT].layout
    axes = output.dim_axes(BATCH)
    assert sharding.operands[OUTPUT] == output
    followers = (*sharding.operands[:4], *sharding.results[:3])
    for layout, dim in zip(followers, (0, 1, 0, 0, 0, 1, 1), strict=True):
        assert (layout.dim_axes(dim), layout.blocks[dim]) == (axes, output.blocks[BATCH])
    assert all(each.is_replicated for each in sharding.operands[4:])
    assert sharding.results[3].partial == tuple(sorted((axis, "sum") for axis in axes))


def test_what_another_axis_shards_is_gathered():
    mesh = Mesh((2, 2), ("data", "model"))
    rows = PlacedTensor((4, 3, 4), Layout(mesh, ("data", None, None)))
    state = PlacedTensor((1, 4, 4), Layout(mesh, (None, "data", None)))
    kept, weight = (
        PlacedTensor((5,), Layout(mesh, (None,))),
        PlacedTensor((2, 4), Layout(mesh, (None, None))),
    )
    for spec, gathers in [("model", True), (None, False)]:
        x = PlacedTensor((4, 3, 2), Layout(mesh, ("data", None, spec)))
        sharding = shard_as(BACKWARD, (x, state, rows, rows, kept, weight), OUTPUT)
        assert sharding.gathers == gathers
        assert str(sharding.operands[0]) == "('data', None, None)"
