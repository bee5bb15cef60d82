"""The cost of a collective."""

import pytest

from shardcore.domain.cost.collective_cost import (
    BETWEEN_HOSTS,
    WITHIN_A_HOST,
    Costs,
    Link,
    links_of,
    slowest,
)
from shardcore.domain.errors import MeshError

GROUPS = {"data": ((0, 2), (1, 3)), "model": ((0, 1), (2, 3))}


@pytest.mark.parametrize("name", ["latency", "bandwidth"])
@pytest.mark.parametrize("value", [0, -1.0, float("nan"), float("inf"), "fast", None])
def test_a_link_has_positive_numbers(name, value):
    with pytest.raises(MeshError, match=f"has a {name} above 0, in .*, got {value!r}"):
        Link(**{name: value})


@pytest.mark.parametrize("value", [0, -1.0, float("nan"), "fast", None])
def test_a_kind_of_collective_has_a_positive_bandwidth(value):
    with pytest.raises(MeshError, match=f"a bandwidth of 'send' above 0, in .*, got {value!r}"):
        Link(bandwidths={"send": value})


@pytest.mark.parametrize("given", [{"all_reduce": 1e9}, {"gather": 1e9}, 1e9, None])
def test_other_kinds_of_collectives_are_an_error(given):
    kinds = r"by kind, one of all_gather, all_to_all, reduce_scatter, send: got .*an all_reduce is"
    with pytest.raises(MeshError, match=kinds):
        Link(bandwidths=given)


def test_a_collective_takes_the_bandwidth_of_its_kind():
    costs = Costs({"data": Link(1.0, 100.0, {"reduce_scatter": 50.0})})
    found = {
        kind: costs.collective(kind, "data", 2, 400) for kind in ("all_gather", "reduce_scatter")
    }
    assert found == {"all_gather": 1 + 200 / 100, "reduce_scatter": 1 + 200 / 50}


def test_the_slowest_link_has_the_lowest_bandwidth_of_each_kind():
    first = Link(1.0, 10.0, {"all_gather": 4.0})
    second = Link(2.0, 8.0, {"all_gather": 6.0, "send": 9.0})
    assert slowest((first, second)) == Link(2.0, 8.0, {"all_gather": 4.0, "send": 9.0})
    assert slowest((first,)) == first


def test_an_axis_within_each_host_is_faster_than_one_between_hosts():
    links = dict(links_of(GROUPS, ("a", "a", "b", "b"), {}))
    assert links == {"data": BETWEEN_HOSTS, "model": WITHIN_A_HOST}
    costs = Costs(links)
    for sent in (1, 10**9):
        slow, fast = (costs.collective("all_gather", axis, 2, sent) for axis in GROUPS)
        assert slow > fast


def test_a_given_link_wins_over_the_hosts():
    own = Link(latency=1e-3)
    links = dict(links_of(GROUPS, ("a",) * 4, {"data": own}))
    assert links == {"data": own, "model": WITHIN_A_HOST}


def test_a_link_of_no_axis_is_an_error():
    with pytest.raises(MeshError, match=r"names the axes \['modle'\], but the mesh has"):
        links_of(GROUPS, ("a",) * 4, {"modle": Link()})
