"""A rank looks for the ranks that it waited for only while that is of use."""

import pytest

from shardcore.adapters.ranks.failure import heartbeats
from shardcore.adapters.ranks.job import exchange, process_group

ERROR = RuntimeError("[gloo/transport/tcp/pair.cc] Connection closed by peer")


@pytest.fixture
def asked(monkeypatch):
    """The connections that were opened to a store that is gone."""
    connections = []

    def store_for_thread():
        connections.append("opened")
        raise RuntimeError("recvValue failed")

    monkeypatch.setattr(exchange, "store_for_thread", store_for_thread)
    monkeypatch.setattr(process_group, "is_simulated", lambda: False)
    return connections


def test_after_the_failure_of_another_rank_the_store_is_not_asked(asked):
    """The failing rank may hold the store, and torch prints a warning if that closes."""
    assert heartbeats.unmatched(ERROR, is_enough=lambda: True) == ""
    assert asked == []


def test_a_store_that_is_gone_names_no_rank(asked):
    assert heartbeats.unmatched(ERROR) == ""
    assert asked == ["opened"]
