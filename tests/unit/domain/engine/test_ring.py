"""Rings: each query meets the keys that it should, and stripes are taken where they cost less."""

import pytest

from shardcore.domain.cost.collective_cost import Costs, Link
from shardcore.domain.engine.call import PlacedTensor
from shardcore.domain.engine.ring import Ring, visible_keys
from shardcore.domain.engine.rules import layers
from shardcore.domain.engine.segments import ranges_of
from shardcore.domain.layouts.layout import Layout
from shardcore.domain.layouts.mesh import Mesh
from shardcore.domain.layouts.placements import Segments

MESH = Mesh((2, 4), ("data", "seq"))
LENGTHS = frozenset({"q", "k"})


def keys_met(queries, keys, how):
    """The pairs that `how` says of one rank's queries and another's keys, in their order."""
    places = range(len(queries)), range(len(keys))
    rules = {
        "all": lambda at, key: True,
        "causal": lambda at, key: key <= at,
        "earlier": lambda at, key: key < at,
        "none": lambda at, key: False,
    }
    return [
        (queries[at], keys[key]) for at in places[0] for key in places[1] if rules[how](at, key)
    ]


@pytest.mark.parametrize(
    ("length", "blocks"), [(8, 1), (7, 1), (5, 1), (8, Segments(2)), (12, Segments(3))]
)
def test_a_query_meets_each_key_up_to_its_own_place_once(length, blocks):
    layout = Layout(MESH, ("seq",), blocks=(blocks,))
    held = [[at for each in ranges for at in each] for ranges in ranges_of(layout, 0, length)]
    striped = blocks != 1
    found = [
        pair
        for place, queries in enumerate(held)
        for owner, keys in enumerate(held)
        for pair in keys_met(
            queries, keys, visible_keys(place, owner, causal=True, striped=striped)
        )
    ]
    assert sorted(found) == [(query, key) for query in range(length) for key in range(query + 1)]
    if striped:  # no rank has more work with another's keys than with its own
        works = {visible_keys(a, b, causal=True, striped=True) for a in range(4) for b in range(4)}
        assert works == {"causal", "earlier"}


def attention(length, *, causal, link):
    """The sharding of an attention whose batch "data" shards, and whose lengths "seq" does."""
    layout = Layout(MESH, ("data", None, "seq", None))
    operands = [PlacedTensor((4, 3, length, 8), layout)] * 3
    costs = Costs({"seq": link})
    return Ring("seq", LENGTHS, causal).sharding(layers.attention("b h", None), operands, costs)


FAST, SLOW = Link(1e-18, 1e30), Link(1.0, 1.0)


def test_lengths_stay_sharded_and_nothing_is_partial():
    found = attention(10, causal=False, link=FAST)
    assert {each.spec for each in found.operands} == {("data", None, "seq", None)}
    assert [str(each) for each in found.results] == [
        "('data', None, 'seq', None)",
        "('data', None, 'seq')",
    ]
    assert (found.extents["q"], found.extents["k"], found.gathers) == (10, 10, False)


@pytest.mark.parametrize(
    ("length", "causal", "link", "segments"),
    [(8, True, FAST, 2), (8, True, SLOW, 1), (8, False, FAST, 1), (10, True, FAST, 1)],
    ids=["causal", "slow link", "full", "uneven"],
)
def test_a_causal_attention_takes_stripes_if_the_exchange_costs_less(
    length, causal, link, segments
):
    found = attention(length, causal=causal, link=link)
    assert {each.segments[2] for each in (*found.operands, *found.results)} == {segments}
