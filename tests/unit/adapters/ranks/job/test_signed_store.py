"""Values in a store that other programs can write too."""

import random

import pytest
from torch.distributed import HashStore

from shardcore.adapters.ranks.job.signed_store import PIECE, SignedStore
from shardcore.domain.errors import EnvironmentProblem

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


@pytest.mark.parametrize("size", [PIECE, PIECE + 1, 3 * PIECE + 5])
def test_a_value_of_any_size_is_read_and_removed(shared, size):
    value = random.Random(0).randbytes(size)
    shared.set("large", value)
    assert shared.get(["large"]) == [value]
    assert shared.find("large") == value
    assert shared.find_all(["large", "none"]) == [value, None]
    shared.delete("large")
    shared.delete("large")
    assert shared.find("large") is None


@pytest.mark.parametrize("change", ["forged", "of an earlier value", "removed"])
def test_a_piece_that_is_not_of_the_value_is_seen(shared, change, capfd):
    shared.set("large", bytes(PIECE) + b"first")
    pieces = shared._pieces_of("large", shared.store.get("large"))
    earlier = shared.store.get(pieces[1])
    shared.set("large", bytes(PIECE) + b"other")
    _, last = shared._pieces_of("large", shared.store.get("large"))
    if change == "removed":
        shared.store.delete_key(last)
    else:
        shared.store.set(last, earlier if change != "forged" else "a" * 37)
    with pytest.raises(EnvironmentProblem, match="another program has written it"):
        shared.get(["large"])
    assert shared.find("large") is None
    assert "large" in capfd.readouterr().err
