"""The cost of a collective."""

import pytest

from shardcore.domain.errors import MeshError
from shardcore.domain.machines.collective_cost import (
    BETWEEN_HOSTS,
    WITHIN_A_HOST,
    Costs,
    Link,
    links_of,
)

GROUPS = {"data": ((0, 2), (1, 3)), "model": ((0, 1), (2, 3))}


@pytest.mark.parametrize("name", ["latency", "bandwidth"])
@pytest.mark.parametrize("value", [0, -1.0, float("nan"), float("inf"), "fast", None])
def test_a_link_has_positive_numbers(name, value):
    with pytest.raises(MeshError, match=f"has a {name} above 0, in .*, got {value!r}"):
        Link(**{name: value})


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
