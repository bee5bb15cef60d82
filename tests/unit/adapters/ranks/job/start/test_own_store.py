"""The store of rank 0 listens on the address of the job alone."""

import socket
from datetime import timedelta

import pytest

from shardcore.adapters.ranks.job import rendezvous
from shardcore.adapters.ranks.job.forked_ranks import free_port
from shardcore.domain.ranks.job import resolve_job

LIMIT = timedelta(seconds=20)


def opened(monkeypatch, address, rank="0", size="1", **environment):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    port = free_port()
    named = {"RANK": rank, "WORLD_SIZE": size, "MASTER_ADDR": address, "MASTER_PORT": str(port)}
    return rendezvous.open_store(resolve_job(environ=named | {"LOCAL_RANK": "0"}), LIMIT), port


def answers(address, port):
    """Whether a program listens there."""
    with socket.socket() as tried:
        return tried.connect_ex((address, port)) == 0


@pytest.mark.parametrize("address", ["127.0.0.1", "localhost"])
def test_it_listens_on_the_given_address_and_on_no_other(monkeypatch, address):
    store, port = opened(monkeypatch, address)
    store.set("key", "value")
    assert store.get("key") == b"value"
    assert answers("127.0.0.1", port)
    assert not answers("127.0.0.2", port)


def test_it_listens_on_an_address_of_the_host_that_is_not_the_first(monkeypatch):
    store, port = opened(monkeypatch, "127.0.0.2")
    assert store is not None
    assert answers("127.0.0.2", port)
    assert not answers("127.0.0.1", port)


@pytest.mark.parametrize("address", ["192.0.2.1", "name.invalid", socket.gethostname()])
def test_torch_listens_where_ranks_may_look_elsewhere(monkeypatch, address):
    """For an address of no host, as that of a load balancer has, and for names."""
    assert opened(monkeypatch, address)[0] is None


def test_other_ranks_and_those_of_torchrun_hold_none(monkeypatch):
    assert opened(monkeypatch, "127.0.0.1", rank="1", size="2")[0] is None
    assert opened(monkeypatch, "127.0.0.1", TORCHELASTIC_USE_AGENT_STORE="True")[0] is None
