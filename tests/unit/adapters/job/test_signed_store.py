"""Values in a store that other programs can write too."""

import pytest
from torch.distributed import HashStore

from shardcore.adapters.job.signed_store import SignedStore

KEYS = ["heartbeat/0", "heartbeat/1", "heartbeat/2"]


@pytest.fixture
def shared():
    return SignedStore(HashStore(), b"drawn by rank 0")


def test_all_values_are_found(shared):
    for key in KEYS:
        shared.set(key, key.encode())
    assert shared.find_all(KEYS) == [b"heartbeat/0", b"heartbeat/1", b"heartbeat/2"]


def test_a_value_that_is_not_there_is_none(shared):
    for key in KEYS[:2]:
        shared.set(key, key.encode())
    assert shared.find_all(KEYS) == [b"heartbeat/0", b"heartbeat/1", None]


def test_a_value_of_another_program_is_none_and_a_line_says_so(shared, capfd):
    for key in KEYS:
        shared.set(key, key.encode())
    shared.store.set(KEYS[1], "forged, and longer than a signature of 32 bytes")
    assert shared.find_all(KEYS) == [b"heartbeat/0", None, b"heartbeat/2"]
    assert "heartbeat/1" in capfd.readouterr().err
