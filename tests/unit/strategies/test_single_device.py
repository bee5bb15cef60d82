import pytest

from shardcore.domain.errors import StrategyError
from shardcore.domain.layouts.layout import Layout
from shardcore.domain.layouts.mesh import Mesh
from shardcore.ports.world import World
from shardcore.strategies.single_device import SingleDeviceStrategy

ONE = World(Mesh((1, 1), ("data", "model")), (0,), 0, "cpu")


def test_on_one_device_every_value_is_returned_unchanged():
    strategy, value = SingleDeviceStrategy(ONE), object()
    layout = Layout(ONE.mesh, ("data", "model"))
    assert strategy.create(value, layout, None) is value
    assert strategy.from_local(value, layout, (4, 4)) is value
    assert strategy.redistribute(value, layout) is value
    assert strategy.to_local(value) is value
    assert strategy.layout(value) is None
    assert not strategy.owns(value)


def test_a_mesh_of_several_ranks_is_refused_with_the_remedy():
    world = World(Mesh((2,), ("data",)), (0, 1), 0, "cpu")
    with pytest.raises(StrategyError, match=r"serves one device.*strategy=\"dtensor\""):
        SingleDeviceStrategy(world)
