"""The rules of elementwise operators, products, reductions and layer norms, over all ranks."""

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from shardcore.domain.engine.rules import basic
from tests.unit.domain.engine.rules import numpy_operators as reference
from tests.unit.domain.engine.rules.proof import REDUCTIONS, Call, names_of_rules, prove, sizes

shapes = st.lists(sizes, min_size=1, max_size=3).map(tuple)


@st.composite
def sums_of_broadcast(draw):
    shape = draw(shapes)
    other = tuple(draw(st.sampled_from([size, size, 1])) for size in shape)
    other = other[draw(st.integers(0, len(other))) :]
    rule = basic.elementwise((shape, other))
    return Call(rule, [shape, other], lambda parts: [parts[0] * parts[1]])


@st.composite
def products(draw):
    n, k, m = draw(sizes), draw(sizes), draw(sizes)
    shapes = [*draw(st.sampled_from([[], [(m,)], [(1, m)], [(n, m)]])), (n, k), (k, m)]
    rule, _ = basic.product("n k, k m", "n m", *shapes)

    def run(parts):
        *added, left, right = parts
        return [left @ right + sum(added)]

    return Call(rule, shapes, run)


@st.composite
def reductions(draw):
    shape = draw(shapes)
    dims = draw(st.sets(st.integers(0, len(shape) - 1), min_size=1))
    keep, op = draw(st.booleans()), draw(st.sampled_from([None, *REDUCTIONS]))
    rule = basic.reduction(len(shape), frozenset(dims), keep, op)
    function = REDUCTIONS.get(op, np.median)
    return Call(rule, [shape], lambda parts: [function(parts[0], axis=tuple(dims), keepdims=keep)])


@st.composite
def joins(draw):
    shape, count = draw(shapes), draw(st.integers(1, 3))
    dim = draw(st.integers(0, len(shape) - 1))
    rule = basic.along(len(shape), frozenset({dim}), operands=count)
    return Call(rule, [shape] * count, lambda parts: [np.concatenate(parts, axis=dim)])


@st.composite
def pads(draw):
    shape = tuple(draw(st.lists(sizes, min_size=1, max_size=4)))
    widths = [draw(st.sampled_from([(0, 0), (0, 0), (1, 0), (1, 2)])) for _ in shape]
    padded = frozenset(dim for dim, width in enumerate(widths) if any(width))
    mode = draw(st.sampled_from(["constant", "edge", "symmetric"]))
    rule = basic.along(len(shape), padded)
    return Call(rule, [shape], lambda parts: [np.pad(parts[0], widths, mode=mode)])


@st.composite
def max_pools(draw):
    shape = (*draw(st.lists(sizes, max_size=2)), 4, 5)
    plane, size = frozenset({len(shape) - 2, len(shape) - 1}), draw(st.integers(1, 3))
    if draw(st.booleans()):
        rule = basic.along(len(shape), plane, results=2)
        return Call(rule, [shape], lambda parts: reference.max_pool(*parts, size))

    def backward(parts):
        gradient, x = parts
        return [reference.max_pool_backward(gradient, x, reference.max_pool(x, size)[1], size)]

    pooled = (*shape[:-2], 5 - size, 6 - size)
    return Call(basic.along(len(shape), plane, operands=2), [pooled, shape], backward)


@st.composite
def layer_norms(draw):
    shape = (*draw(st.lists(sizes, min_size=1, max_size=2)), 4)
    weights = draw(st.integers(0, 2))

    def run(parts):
        x, *given = parts
        mean, deviation = x.mean(-1, keepdims=True), x.std(-1, keepdims=True)
        scale, shift = (*given, *(1.0, 0.0)[len(given) :])
        return [(x - mean) / deviation * scale + shift, mean, deviation]

    return Call(basic.layer_norm(len(shape) - 1, 1, weights), [shape, *[(4,)] * weights], run)


@st.composite
def layer_norms_backward(draw):
    shape = (*draw(st.lists(sizes, min_size=1, max_size=2)), 4)
    weights = draw(st.integers(0, 2))

    def run(parts):
        gradient, x, mean, deviation, *given = parts
        rows = tuple(range(x.ndim - 1))
        of_input = gradient * (given[0] if given else 1.0) / deviation - mean
        of_weight = (gradient * (x - mean) / deviation).sum(rows)
        return [of_input, of_weight, gradient.sum(rows)]

    few = (*shape[:-1], 1)
    rule = basic.layer_norm_backward(len(shape) - 1, 1, weights)
    return Call(rule, [shape, shape, few, few, *[(4,)] * weights], run)


# The calls of each rule, and the factors that they have.
CALLS = {
    "along": (st.one_of(pads(), max_pools()), "abc"),
    "along, joined": (joins(), "abc"),
    "elementwise": (sums_of_broadcast(), "abc"),
    "layer_norm": (layer_norms(), "ab"),
    "layer_norm_backward": (layer_norms_backward(), "ab"),
    "product": (products(), "nkm"),
    "reduction": (reductions(), "abc"),
}


def test_every_rule_is_proved():
    assert {name.partition(",")[0] for name in CALLS} == names_of_rules(basic)


@pytest.mark.parametrize(("name", "factor"), [(n, f) for n in CALLS for f in CALLS[n][1]])
# A factor is in few of a rule's calls, and others are passed over.
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.filter_too_much])
@given(st.data())
def test_the_shards_give_the_full_result(name, factor, data):
    prove(data.draw(CALLS[name][0]), factor, data)
