"""The rules of views, pieces, joins and reshapes, over all ranks."""

import numpy as np
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from shardcore.domain.engine.rules import movement
from shardcore.domain.layouts.placements import Segments
from tests.unit.domain.engine.rules.proof import Call, names_of_rules, prove, sizes

shapes = st.lists(sizes, min_size=1, max_size=3).map(tuple)


@st.composite
def transposes(draw):
    shape = draw(shapes)
    dims = draw(st.permutations(range(len(shape))))
    at = draw(st.integers(0, len(dims)))
    rule = movement.permute(len(shape), (*dims[:at], None, *dims[at:]))
    return Call(rule, [shape], lambda parts: [np.expand_dims(parts[0].transpose(dims), at)])


@st.composite
def unbinds(draw):
    shape = draw(shapes)
    dim = draw(st.integers(0, len(shape) - 1))
    dims = [each for each in range(len(shape)) if each != dim]
    rule = movement.permute(len(shape), dims, results=shape[dim])
    return Call(rule, [shape], lambda parts: list(np.moveaxis(parts[0], dim, 0)))


@st.composite
def reshapes(draw):
    shape = draw(st.sampled_from([(4, 6), (6, 4, 5), (24,), (2, 1, 3, 4), (12, 2), (5, 4), (1, 6)]))
    target = draw(st.sampled_from([(-1,), (2, -1), (-1, 4), (4, 6), (3, -1, 2), (6, 1, -1)]))
    try:
        target = np.empty(shape).reshape(target).shape
    except ValueError:
        assume(False)
    sharded = []
    for dim in draw(st.sets(st.integers(0, len(shape) - 1))):
        count = draw(st.sampled_from([n for n in (1, 2, 3, 4) if not shape[dim] % n]))
        outer = 1 if count > 1 and draw(st.booleans()) else 0
        sharded.append((dim, Segments(count, outer=outer)))
    found = movement.reshape(shape, target, tuple(sharded))
    return Call(found, [shape], lambda parts: [parts[0].reshape(target)], reshapes=True)


def _cut_in_pieces(draw):
    """A shape, one of its dims, and how many segments of that each piece has."""
    shape, counts = list(draw(shapes)), draw(st.lists(st.integers(1, 2), min_size=1, max_size=3))
    dim = draw(st.integers(0, len(shape) - 1))
    return shape, dim, tuple(counts)


@st.composite
def pieces(draw):
    shape, dim, counts = _cut_in_pieces(draw)
    first, count = draw(st.integers(0, len(counts) - 1)), sum(counts)
    shape[dim] *= count
    rule = movement.segmented(len(shape), dim, (count,), counts[first:])

    def run(parts):
        ends = np.cumsum(counts)[:-1] * (parts[0].shape[dim] // count)
        return np.split(parts[0], ends, dim)[first:]

    return Call(rule, [tuple(shape)], run)


@st.composite
def of_pieces(draw):
    shape, dim, counts = _cut_in_pieces(draw)
    given, count = counts[: draw(st.integers(1, len(counts)))], sum(counts)
    rule = movement.segmented(len(shape), dim, given, (count,))

    def run(parts):
        segment = np.zeros_like(np.split(parts[0], given[0], dim)[0])
        return [np.concatenate([*parts, *[segment] * (count - sum(given))], axis=dim)]

    return Call(rule, [(*shape[:dim], shape[dim] * n, *shape[dim + 1 :]) for n in given], run)


@st.composite
def cuts(draw):
    shape, dim, counts = _cut_in_pieces(draw)
    sizes = [count * shape[dim] for count in counts]
    shape[dim] = sum(sizes)

    def run(parts):
        ends = np.cumsum(sizes)[:-1] * parts[0].shape[dim] // sum(sizes)
        return np.split(parts[0], ends, dim)

    return Call(movement.cut(len(shape), dim, sizes), [tuple(shape)], run)


@st.composite
def joins(draw):
    shape, dim, counts = _cut_in_pieces(draw)
    sizes = [count * shape[dim] for count in counts]
    rule = movement.concatenation(len(shape), dim, sizes)
    given = [(*shape[:dim], size, *shape[dim + 1 :]) for size in sizes]
    return Call(rule, given, lambda parts: [np.concatenate(parts, dim)])


@st.composite
def repeats(draw):
    shape = draw(shapes)
    times = tuple(draw(st.integers(1, 3)) for _ in shape)
    new = draw(st.sampled_from([(), (2,)]))
    rule = movement.repeat(len(shape), (*new, *times))
    return Call(rule, [shape], lambda parts: [np.tile(parts[0], (*new, *times))])


@st.composite
def stacks(draw):
    shape, count = draw(shapes), draw(st.integers(1, 3))
    dim = draw(st.integers(0, len(shape)))
    dims = [*range(dim), None, *range(dim, len(shape))]
    rule = movement.permute(len(shape), dims, operands=count)
    return Call(rule, [shape] * count, lambda parts: [np.stack(parts, axis=dim)])


# The calls of each rule, and the factors that they have.
CALLS = {
    "permute": (transposes(), "abc"),
    "permute, unbound": (unbinds(), "abc"),
    "permute, stacked": (stacks(), "abc"),
    "segmented, concatenation": (of_pieces(), "abc"),
    "segmented, cut": (pieces(), "abc"),
    "cut": (cuts(), "abc"),
    "concatenation": (joins(), "abc"),
    "repeat": (repeats(), "abc"),
    "reshape": (reshapes(), "abc"),
}


def test_every_rule_is_proved():
    assert {name.partition(",")[0] for name in CALLS} == names_of_rules(movement)


@pytest.mark.parametrize(("name", "factor"), [(n, f) for n in CALLS for f in CALLS[n][1]])
# A factor is in few of a rule's calls, and others are passed over.
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.filter_too_much])
@given(st.data())
def test_the_shards_give_the_full_result(name, factor, data):
    prove(data.draw(CALLS[name][0]), factor, data)
