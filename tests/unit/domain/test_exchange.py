import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from shardcore.domain.layout import Layout
from shardcore.domain.mesh import Mesh
from shardcore.domain.placements import blocks_of
from shardcore.domain.segments import Exchange, ranges_of


@st.composite
def splits(draw, size, ranks):
    """Per rank the elements that it has of a dim, split within segments or not."""
    count = draw(st.sampled_from([each for each in range(1, size + 1) if size % each == 0]))
    block = blocks_of(count, draw(st.integers(1, 4)))
    return ranges_of(Layout(Mesh((ranks,), ("model",)), ("model",), blocks=(block,)), 0, size)


@st.composite
def exchanges(draw):
    size, ranks = draw(st.integers(1, 24)), draw(st.integers(1, 4))
    held = draw(splits(size, ranks))
    if draw(st.booleans()):
        return Exchange("model", 0, held, draw(splits(size, ranks)))
    ends = [sorted(draw(st.tuples(*[st.integers(0, size)] * 2))) for _ in range(ranks)]
    return Exchange("model", 0, held, tuple((range(*each),) for each in ends))


def elements(ranges):
    return [element for each in ranges for element in each]


@given(exchanges())
def test_each_rank_gets_its_elements_in_order(exchange):
    held = [np.array(elements(each), dtype=int) for each in exchange.held]
    for place, wanted in enumerate(exchange.wanted):
        messages = [
            iter([parts[part] for part in exchange.sent(peer, place)])
            for peer, parts in enumerate(held)
        ]
        found = []
        for owner, size in exchange.received(place):
            found.append(next(messages[owner]))
            assert len(found[-1]) == size
        assert np.concatenate([*found, []]).tolist() == elements(wanted)
        assert not any(list(left) for left in messages)


@given(exchanges())
def test_it_is_local_where_each_rank_holds_what_it_wants(exchange):
    pairs = zip(exchange.held, exchange.wanted, strict=True)
    holds_all = all(set(elements(wanted)) <= set(elements(held)) for held, wanted in pairs)
    assert exchange.is_local == holds_all
