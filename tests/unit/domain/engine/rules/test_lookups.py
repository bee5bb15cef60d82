"""The rules of look-ups, over all ranks."""

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from shardcore.domain.engine.rules import lookups
from tests.unit.domain.engine.rules.proof import Call, as_indices, names_of_rules, prove, sizes
from tests.unit.domain.engine.rules.test_losses import CALLS as LOSSES

shapes = st.lists(sizes, min_size=1, max_size=3).map(tuple)


@st.composite
def embeddings(draw):
    dims = tuple(draw(st.lists(sizes, min_size=1, max_size=2)))

    def run(parts):
        return [parts[0][as_indices(parts[1], 5)]]

    return Call(lookups.index(2, 0, 1, len(dims)), [(5, draw(sizes)), dims], run)


@st.composite
def embeddings_of_rows(draw):
    dims = tuple(draw(st.lists(sizes, min_size=1, max_size=2)))
    rows = draw(sizes)

    def run(parts):
        table, indices, numbers = parts
        # Rows of one number, as two of these may be, are added; of a number without rows, zeros.
        found = as_indices(indices, 5)[..., None] == as_indices(numbers, 5)
        return [found.astype(float) @ table]

    return Call(lookups.embedding_of_rows(len(dims)), [(rows, draw(sizes)), dims, (rows,)], run)


@st.composite
def embeddings_backward(draw):
    dims = tuple(draw(st.lists(sizes, min_size=1, max_size=2)))

    def run(parts):
        gradient, where = parts
        table = np.zeros((5, gradient.shape[-1]))
        np.add.at(table, as_indices(where, 5), gradient)
        return [table]

    return Call(lookups.embedding_backward(len(dims)), [(*dims, draw(sizes)), dims], run)


@st.composite
def takes(draw):
    shape = draw(shapes)
    dim = draw(st.integers(0, len(shape) - 1))
    rule = lookups.index(len(shape), dim, 1, 1)

    def run(parts):
        return [np.take(parts[0], as_indices(parts[1], shape[dim]), axis=dim)]

    return Call(rule, [shape, (draw(sizes),)], run)


@st.composite
def indexings(draw):
    before, after = (tuple(draw(st.lists(sizes, max_size=1))) for _ in range(2))
    looked_up = (3, 4)[: draw(st.integers(1, 2))]
    found = tuple(draw(st.lists(sizes, min_size=1, max_size=2)))

    def run(parts):
        tensor, *numbers = parts
        at = (as_indices(n, upto) for n, upto in zip(numbers, looked_up, strict=True))
        return [tensor[(slice(None),) * len(before) + tuple(at)]]

    shape = (*before, *looked_up, *after)
    rule = lookups.index(len(shape), len(before), len(looked_up), len(found))
    return Call(rule, [shape, *[found] * len(looked_up)], run)


@st.composite
def index_puts(draw):
    indexed, count = draw(st.integers(1, 2)), draw(sizes)
    looked_up, rest = (3, 4)[:indexed], tuple(draw(st.lists(sizes, max_size=2)))
    accumulates = draw(st.booleans())

    def run(parts):
        tensor, *numbers, values = parts
        at = tuple(as_indices(n, upto) for n, upto in zip(numbers, looked_up, strict=True))
        result = tensor.copy()
        if accumulates:
            np.add.at(result, at, values)
        else:
            result[at] = values
        return [result]

    shapes = [(*looked_up, *rest), *[(count,)] * indexed, (count, *rest)]
    rule = lookups.index_put(indexed + len(rest), indexed, accumulates)
    return Call(rule, shapes, run)


@st.composite
def look_ups(draw):
    shape = draw(shapes)
    dim = draw(st.integers(0, len(shape) - 1))
    index = (*shape[:dim], draw(sizes), *shape[dim + 1 :])
    rule = lookups.gather(dim, shape, index)

    def run(parts):
        return [np.take_along_axis(parts[0], as_indices(parts[1], shape[dim]), axis=dim)]

    return Call(rule, [shape, index], run)


@st.composite
def scatters(draw):
    shape = draw(shapes)
    dim = draw(st.integers(0, len(shape) - 1))
    index = (*shape[:dim], draw(st.integers(1, shape[dim])), *shape[dim + 1 :])
    given = [shape, index, index][: draw(st.integers(2, 3))]
    rule = lookups.gather(dim, *given)

    def run(parts):
        found, places = parts[0].copy(), as_indices(parts[1], shape[dim])
        np.put_along_axis(found, places, (*parts[2:], 1.0)[0], axis=dim)
        return [found]

    return Call(rule, given, run)


@st.composite
def places(draw):
    shape, numbers = draw(shapes), draw(sizes)
    rule = lookups.searchsorted(len(shape))

    def run(parts):
        return [np.searchsorted(np.sort(parts[1]), parts[0])]

    return Call(rule, [shape, (numbers,)], run)


# The calls of each rule, and the factors that they have.
CALLS = {
    "embedding_backward": (embeddings_backward(), "abz"),
    "embedding_of_rows": (embeddings_of_rows(), "abvz"),
    "index": (indexings(), ("a", "b", "c", "d", "i0", "i1")),
    "index, rows of a table": (embeddings(), ("b", "i0", "i1")),
    "index, one dim": (takes(), ("a", "b", "c", "i0")),
    "index_put": (index_puts(), "nbcd"),
    "gather, gathered": (look_ups(), "abc"),
    "gather, scattered": (scatters(), "abc"),
    "searchsorted": (places(), "abc"),
}


def test_every_rule_is_proved():
    of_losses = {name.split()[0] for name in LOSSES}
    assert {name.partition(",")[0] for name in CALLS} | of_losses == names_of_rules(lookups)


@pytest.mark.parametrize(("name", "factor"), [(n, f) for n in CALLS for f in CALLS[n][1]])
# A factor is in few of a rule's calls, and others are passed over.
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.filter_too_much])
@given(st.data())
def test_the_shards_give_the_full_result(name, factor, data):
    prove(data.draw(CALLS[name][0]), factor, data)
