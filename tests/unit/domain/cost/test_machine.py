"""A machine as data, and the links that it gives to the axes of a mesh."""

import json

import attrs
import pytest

from shardcore.domain.cost.collective_cost import Link
from shardcore.domain.cost.machine import Machine, Speed, known_machines, machine_of
from shardcore.domain.errors import MachineError
from shardcore.domain.layouts.mesh import Mesh

NEAR, FAR = Link(1e-6, 100e9), Link(1e-5, 10e9)
HOST = Machine("host", 8, 10**9, {"float32": Speed(1e12, 1e11)}, NEAR, FAR)


@pytest.mark.parametrize(
    ("shape", "axis", "bandwidth"),
    [
        ((4, 8), "model", None),  # a host
        ((16, 2), "model", None),  # a quarter of a host
        ((2, 2), "data", None),  # a mesh that one host holds
        ((4, 8), "data", 10e9),  # one rank of each host
        ((8, 4), "data", 20e9),  # two ranks of each host
        ((2, 16), "model", 80e9),  # eight ranks of each of two hosts
        ((4, 6), "model", 60e9),  # groups of six, some of which two hosts share
    ],
)
def test_an_axis_has_the_link_that_its_ranks_use(shape, axis, bandwidth):
    link = HOST.links(Mesh(shape, ("data", "model")))[axis]
    assert link == (NEAR if bandwidth is None else Link(FAR.latency, bandwidth))


def test_ranks_of_a_host_send_no_faster_than_within_it():
    wide = attrs.evolve(HOST, between=Link(1e-5, 50e9))
    assert wide.links(Mesh((64,), ("data",)))["data"].bandwidth == NEAR.bandwidth


def test_each_kind_of_collective_has_the_bandwidth_of_the_slower_link():
    far = Link(1e-5, 10e9, {"all_gather": 30e9, "reduce_scatter": 5e9})
    near = Link(1e-6, 100e9, {"reduce_scatter": 50e9, "send": 15e9})
    links = attrs.evolve(HOST, within=near, between=far).links(Mesh((8, 4), ("data", "model")))
    assert links["data"] == Link(
        1e-5, 20e9, {"all_gather": 60e9, "reduce_scatter": 10e9, "send": 15e9}
    )


def test_an_operator_takes_the_longer_of_computing_and_reading():
    speed = Speed(flops=1e12, bandwidth=1e11)
    assert speed.seconds(flops=2e12, moved=1e11) == 2
    assert speed.seconds(flops=1e12, moved=3e11) == 3


@pytest.mark.parametrize("machine", known_machines().values(), ids=list(known_machines()))
def test_a_known_machine_is_the_same_after_it_was_written_as_data(machine):
    assert machine_of(machine.to_dict()) == machine


def test_bandwidths_of_kinds_are_the_same_after_they_were_written_as_data():
    machine = attrs.evolve(HOST, within=Link(1e-6, 1e9, {"send": 2e9}))
    assert machine_of(json.loads(json.dumps(machine.to_dict()))) == machine


def _with(**changes):
    return {**HOST.to_dict(), **changes}


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (7, "A machine is given by its fields, got 7"),
        ({"name": "x"}, "'devices' is missing, 'memory' is missing, 'speeds' is missing"),
        (_with(cores=3), "'cores' is unknown"),
        (_with(devices=0), "has devices above 0, in a number of devices, got 0"),
        (_with(devices=True), "an integer, a number of devices: got True"),
        (_with(memory="80GB"), "an integer, bytes: got '80GB'"),
        (_with(hidden=1.5), "has hidden from 0 to 1, a share: got 1.5"),
        (_with(hidden="all"), "has hidden from 0 to 1, a share: got 'all'"),
        (_with(speeds=[]), r"by dtype, .*got \[\]"),
        (_with(speeds={}), r"stands in for a dtype without one: got speeds for \[\]"),
        (_with(speeds={"float32": {"flops": 1e12}}), "for 'float32' has the fields .*'bandwidth'"),
        (
            _with(speeds={"float32": {"flops": -1, "bandwidth": 1}}),
            "flops above 0, in operations a second, got -1",
        ),
        (_with(within={"latency": "fast"}), "The link 'within': A link has a latency above 0"),
    ],
)
def test_data_that_describe_no_machine_are_an_error(data, message):
    with pytest.raises(MachineError, match=message):
        machine_of(data)
