"""The description of the machine at hand, measured by real ranks."""

import socket

import pytest

import shardcore
from shardcore.adapters.cost import rates
from shardcore.bootstrap.cost import machines
from shardcore.domain.cost.collective_cost import BETWEEN_HOSTS, KINDS, WITHIN_A_HOST
from shardcore.domain.errors import MachineError
from shardcore.testing import run_ranks


def measured(rank, hosts):
    """Returns the description by a rank that takes itself for one of that host."""
    rates._SECONDS = 0.02
    socket.gethostname = lambda: hosts[rank]
    shardcore.install()
    return machines.measure("mine")


@pytest.mark.parametrize("hosts", ["aa", "ab"])
def test_all_ranks_get_one_description_with_the_link_that_they_have_measured(hosts):
    first, second = run_ranks(measured, 2, hosts)
    assert first == second
    assert list(first.speeds) == ["float32", "bfloat16", "float16"]
    alone = hosts == "ab"
    assert first.devices == (1 if alone else 2)
    assert (first.within == WITHIN_A_HOST) is alone
    assert (first.between == BETWEEN_HOSTS) is not alone
    measured_link = first.between if alone else first.within
    assert sorted(measured_link.bandwidths) == sorted(KINDS)


def test_hosts_with_different_numbers_of_ranks_are_an_error():
    def program(rank):
        with pytest.raises(MachineError, match=r"Expected as many ranks on each host"):
            measured(rank, "aab")

    run_ranks(program, 3)
