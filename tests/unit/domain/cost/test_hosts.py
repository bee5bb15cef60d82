"""Mesh axes that cross hosts, by the hosts of their ranks."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardcore.domain.cost.collective_cost import crossing_warning, ranks_by_host
from shardcore.domain.layouts.mesh import Mesh

HOSTS = ("a", "a", "b", "b")


def test_an_axis_within_hosts_has_no_warning():
    assert crossing_warning(Mesh((2, 2), ("data", "model")), "model", range(4), HOSTS) == ""
    assert crossing_warning(Mesh((4,), ("model",)), "model", range(4), "aaaa") == ""


def test_an_axis_that_crosses_hosts_is_named_with_its_ranks_and_the_cost():
    found = crossing_warning(Mesh((4,), ("model",)), "model", range(4), HOSTS)
    assert "'model' crosses hosts: its ranks 0, 1, 2, 3 are on a, b." in found
    # An all-reduce sends 3/2 of 16 MiB: at 5 and 13 GB/s, after 25 and 10 microseconds.
    assert "takes 5.1 ms, and 1.9 ms within a host" in found
    assert "divides 2, the ranks of a host" in found


def test_the_advice_fits_hosts_of_one_rank_and_of_different_sizes():
    mesh = Mesh((2,), ("model",))
    assert "Shard the batch over it instead" in crossing_warning(mesh, "model", range(2), "ab")
    mesh = Mesh((10,), ("model",))
    assert "divides 2, the ranks" in crossing_warning(mesh, "model", range(10), "aaaabbbbbb")


def test_the_processes_of_a_mesh_may_stand_in_any_order():
    assert crossing_warning(Mesh((2, 2), ("data", "model")), "model", (0, 2, 1, 3), HOSTS)
    assert crossing_warning(Mesh((2, 2), ("data", "model")), "data", (0, 2, 1, 3), HOSTS) == ""


@given(st.lists(st.sampled_from("abc"), min_size=1, max_size=12))
def test_each_rank_is_on_its_host(hosts):
    found = ranks_by_host(hosts)
    assert {rank: host for host, ranks in found.items() for rank in ranks} == dict(enumerate(hosts))


@pytest.mark.parametrize("size", [2, 4, 8])
@given(data=st.data())
def test_there_is_a_warning_if_a_group_is_on_two_hosts(size, data):
    hosts = data.draw(st.lists(st.sampled_from("ab"), min_size=8, max_size=8))
    mesh = Mesh((8 // size, size), ("data", "model"))
    groups = [hosts[n * size : (n + 1) * size] for n in range(8 // size)]
    assert bool(crossing_warning(mesh, "model", range(8), hosts)) == any(
        len(set(g)) > 1 for g in groups
    )
