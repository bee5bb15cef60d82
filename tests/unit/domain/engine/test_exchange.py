import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from shardcore.domain.engine.exchange import Exchange, Strided
from shardcore.domain.engine.segments import Shift, ranges_of
from shardcore.domain.layouts.layout import Layout
from shardcore.domain.layouts.mesh import Mesh
from shardcore.domain.layouts.placements import blocks_of


@st.composite
def held_by_ranks(draw, size, ranks):
    """Per rank the elements that it has of a dim, sharded within segments or not."""
    count = draw(st.sampled_from([each for each in range(1, size + 1) if size % each == 0]))
    block = blocks_of(count, draw(st.integers(1, 4)))
    return ranges_of(Layout(Mesh((ranks,), ("model",)), ("model",), blocks=(block,)), 0, size)


@st.composite
def exchanges(draw):
    size, ranks = draw(st.integers(1, 24)), draw(st.integers(1, 4))
    held = draw(held_by_ranks(size, ranks))
    if draw(st.booleans()):
        return Exchange("model", 0, held, draw(held_by_ranks(size, ranks)))
    ends = [sorted(draw(st.tuples(*[st.integers(0, size)] * 2))) for _ in range(ranks)]
    return Exchange("model", 0, held, tuple((range(*each),) for each in ends))


def elements(ranges):
    return [element for each in ranges for element in each]


def owners(parts):
    """The owner of each element."""
    return [owner for owner, size in parts for _ in range(size)]


@given(exchanges())
def test_each_rank_gets_its_elements_in_order(exchange):
    held = [np.array(elements(each), dtype=int) for each in exchange.held]
    for place, wanted in enumerate(exchange.wanted):
        messages = [
            iter([element for part in exchange.slices_for(peer, place) for element in parts[part]])
            for peer, parts in enumerate(held)
        ]
        found = [next(messages[owner]) for owner in owners(exchange.owners_of(place))]
        assert found == elements(wanted)
        assert not any(list(left) for left in messages)


@given(exchanges())
def test_it_is_local_where_each_rank_holds_what_it_wants(exchange):
    pairs = zip(exchange.held, exchange.wanted, strict=True)
    holds_all = all(set(elements(wanted)) <= set(elements(held)) for held, wanted in pairs)
    assert exchange.is_local == holds_all


@given(exchanges())
def test_regular_parts_and_turns_are_all_parts(exchange):
    ranks = range(len(exchange.held))
    for place in ranks:
        turn, count = exchange.turns(place)
        assert turn * count == exchange.owners_of(place)
        for peer in ranks:
            sent, even = exchange.slices_for(place, peer), exchange.strided(place, peer)
            starts = () if even is None else range(even.start, 1 + sent[-1].start, even.step)
            if even is not None:
                assert len(starts) == even.count
                assert sent == tuple(slice(at, at + even.size) for at in starts)


@pytest.mark.parametrize(("ranks", "count"), [(2, 64), (4, 24)])
def test_stripes_of_rows_take_one_slice_for_each_rank_and_a_turn_for_each_row(ranks, count):
    size = 3 * ranks * count  # rows of `ranks * count` tokens

    def ranges(block):
        layout = Layout(Mesh((ranks,), ("seq",)), ("seq",), blocks=(block,))
        return ranges_of(layout, 0, size)

    exchange = Exchange("seq", 0, ranges(blocks_of(3, 1)), ranges(blocks_of(3 * count, 1)))
    for place in range(ranks):
        for peer in range(ranks):
            assert exchange.strided(place, peer) == Strided(peer, 1, ranks, 3 * count // ranks)
        turn = tuple((owner, count // ranks) for owner in range(ranks))
        assert exchange.turns(place) == (turn, 3)
        back = Exchange("seq", 0, exchange.wanted, exchange.held)
        assert back.turns(place) == (
            tuple((owner, 1) for owner in range(ranks)),
            3 * count // ranks,
        )
        for peer in range(ranks):
            row = Strided(peer * count // ranks, count // ranks, count, 3)
            assert back.strided(place, peer) == row


@given(
    st.integers(2, 4),
    st.integers(1, 12),
    st.sampled_from([1, 2, 3]),
    st.integers(-6, 6),
    st.integers(1, 14),
)
def test_a_shift_gives_each_rank_its_part_of_the_range(ranks, length, block, start, size):
    layout = Layout(Mesh((ranks,), ("model",)), ("model",), blocks=(block,)).normalized((length,))
    shift = Shift.of(layout, 0, length, start, size)
    assume(shift is not None)
    expected = [each if 0 <= each < length else None for each in range(start, start + size)]
    for rank, ((inside,), (before, after)) in enumerate(
        zip(shift.exchange.wanted, shift.pads, strict=True)
    ):
        (part,) = shift.layout.slices((size,), rank)
        assert [None] * before + list(inside) + [None] * after == expected[part]
