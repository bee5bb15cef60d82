"""The predicted cost of a step, by hand."""

import attrs
import pytest

from shardcore.domain.cost.collective_cost import Link
from shardcore.domain.cost.events import Work
from shardcore.domain.cost.machine import Machine, Speed
from shardcore.domain.cost.rank_step import RankCollective, RankStep, cost_of
from shardcore.domain.layouts.mesh import Mesh

NEAR, FAR = Link(1, 1000), Link(10, 100)
SPEEDS = {"float32": Speed(100, 10), "bfloat16": Speed(1000, 10)}
MACHINE = Machine("toy", 4, 10**6, SPEEDS, NEAR, FAR)
MESH = Mesh((3, 4), ("data", "model"))


def cost(*moved, work=()):
    return cost_of(RankStep(MESH, tuple(work), moved, {}), MACHINE)


@pytest.mark.parametrize(
    ("kind", "axis", "operand", "sent", "seconds"),
    [
        ("all_reduce", "model", 8000, 2 * 8000 * 3 / 4, 1 + 12),
        ("reduce_scatter", "model", 8000, 8000 * 3 / 4, 1 + 6),
        ("all_gather", "model", 2000, 2000 * 3, 1 + 6),  # the operand is a quarter
        ("all_to_all", "model", 2000, 2000 * 3 / 4, 1 + 1.5),  # a rank keeps a quarter of it
        ("all_reduce", "data", 300, 2 * 300 * 2 / 3, 10 + 4),
    ],
)
def test_a_collective_takes_latency_and_the_bytes_that_a_ring_sends(
    kind, axis, operand, sent, seconds
):
    found = cost(RankCollective(kind, (axis,), operand, waits=True, times=5))
    assert dict(found.sent) == {axis: 5 * sent}
    assert found.communication[axis] == pytest.approx(5 * seconds)
    assert found.exposed == found.seconds == pytest.approx(5 * seconds)


def test_operators_take_the_speed_of_their_dtype():
    work = [
        Work("mm", "float32", flops=300, bytes=10, updates=False),
        Work("mm", "bfloat16", flops=3000, bytes=10, updates=False, times=2),
        Work("add", "int8", flops=0, bytes=50, updates=False),
    ]
    assert cost(work=work).compute == pytest.approx(3 + 2 * 3 + 5)


def test_collectives_of_weights_are_hidden_behind_operators_and_the_rest_is_exposed():
    waits = RankCollective("all_reduce", ("model",), 4000, waits=True)  # 7 seconds
    hidden = RankCollective("reduce_scatter", ("data",), 600, waits=False)  # 14 seconds
    for flops, exposed in ((2000, 7), (900, 7 + 5)):
        found = cost(waits, hidden, work=[Work("mm", "float32", flops, 0, updates=False)])
        assert found.exposed == pytest.approx(exposed)
        assert found.seconds == pytest.approx(flops / 100 + exposed)


def test_a_machine_hides_a_share_of_a_collective():
    """Of 14 seconds 0.25 are hidden behind 20 seconds of operators, or none."""
    work = (Work("mm", "float32", 2000, 0, updates=False),)
    step = RankStep(
        MESH, work, (RankCollective("reduce_scatter", ("data",), 600, waits=False),), {}
    )
    for share, exposed in ((0.25, 14 * 0.75), (0, 14)):
        assert cost_of(step, attrs.evolve(MACHINE, hidden=share)).exposed == pytest.approx(exposed)


def test_a_collective_takes_the_bandwidth_of_its_kind():
    near = Link(1, 1000, {"reduce_scatter": 500})
    moved = RankCollective("reduce_scatter", ("model",), 8000, waits=True)
    found = cost_of(RankStep(MESH, (), (moved,), {}), attrs.evolve(MACHINE, within=near))
    assert found.exposed == pytest.approx(1 + 6000 / 500)


def test_a_collective_over_two_axes_has_the_slower_link():
    found = cost(RankCollective("all_reduce", ("data", "model"), 1200, waits=True))
    assert dict(found.sent) == {"data, model": 2200}
    assert found.exposed == pytest.approx(10 + 2200 / 100)
