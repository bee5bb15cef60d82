"""Dims in segments, which axes shard among ranks, and then within: what every rank holds."""

from itertools import combinations
from math import prod

import numpy as np
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from shardcore.domain.cost.collective_cost import Costs
from shardcore.domain.engine.call import PlacedTensor
from shardcore.domain.engine.choice import choose
from shardcore.domain.engine.exchange import Exchange
from shardcore.domain.engine.rules.movement import reshape, segmented
from shardcore.domain.engine.rules.rule import rule
from shardcore.domain.engine.segments import (
    has_segments,
    ranges_of,
    sharded_dims,
    stages,
    without_segments,
)
from shardcore.domain.layouts.layout import Layout
from shardcore.domain.layouts.mesh import Mesh
from shardcore.domain.layouts.placements import Segments
from shardcore.testing.simulated_ranks import scatter
from tests.unit.domain.generators import layouts, meshes
from tests.unit.domain.numpy_mesh import run


@st.composite
def in_parts(draw, mesh=None, shape=None, pending=False):
    """A layout with dims in segments, sharded by any of their axes, and a shape that has these."""
    mesh = mesh or draw(meshes)
    shape = shape or draw(st.lists(st.sampled_from([1, 2, 6, 7, 12]), min_size=1, max_size=2))
    plain = draw(layouts(mesh, len(shape), pending=pending))
    blocks = []
    for dim, size in enumerate(shape):
        counts = [count for count in range(1, size + 1) if size % count == 0]
        count, block = draw(st.sampled_from(counts)), draw(st.integers(1, 3))
        outer = draw(st.integers(0, len(plain.ranks(dim))))
        segments = Segments(count, block, outer, draw(st.integers(1, 3)) if outer else 1)
        blocks.append((block if count == 1 else segments) if plain.dim_axes(dim) else 1)
    return Layout(mesh, plain.spec, plain.partial, blocks), tuple(shape)


def numbered(shape):
    return np.arange(1.0, prod(shape) + 1).reshape(shape)


def elements_of_ranks(layout, shape):
    return [part.tolist() for part in scatter(layout, numbered(shape)).values()]


@given(in_parts())
def test_ranks_hold_the_ranges_of_their_chunks_and_each_element_once(case):
    layout, shape = case
    held = scatter(layout, numbered(shape))
    for rank, part in enumerate(held.values()):
        assert layout.local_shape(shape, rank) == part.shape
    for dim, size in enumerate(shape):
        found = [[at for each in ranges for at in each] for ranges in ranges_of(layout, dim, size)]
        assert tuple(map(len, found)) == layout.chunk_sizes(dim, size)
        assert sorted(at for chunk in found for at in chunk) == list(range(size))
        of_dim = Layout(layout.mesh, (layout.spec[dim],), (), (layout.blocks[dim],))
        for at, part in scatter(of_dim, np.arange(size)).items():
            place = 0
            for axis in layout.dim_axes(dim):
                index = layout.mesh.axis_index(axis)
                place = place * layout.mesh.shape[index] + at[index]
            assert part.tolist() == found[place]


@given(in_parts())
def test_a_normalized_layout_gives_every_rank_the_same_elements(case):
    layout, shape = case
    normalized = layout.normalized(shape)
    assert elements_of_ranks(normalized, shape) == elements_of_ranks(layout, shape)
    assert normalized.normalized(shape) == normalized
    assert (normalized.spec, normalized.partial) == (layout.spec, layout.partial)


@given(in_parts(), st.data())
def test_without_some_axes_the_others_shard_as_if_these_had_one_rank(case, data):
    layout, shape = case
    names, sizes = layout.mesh.axis_names, layout.mesh.shape
    gone = data.draw(st.sets(st.sampled_from(names)))
    left = scatter(layout.without(*gone), numbered(shape))
    mesh = Mesh([1 if name in gone else n for name, n in zip(names, sizes, strict=True)], names)
    expected = scatter(Layout(mesh, layout.spec, (), layout.blocks), numbered(shape))
    for at, part in left.items():
        place = tuple(0 if name in gone else n for name, n in zip(names, at, strict=True))
        np.testing.assert_array_equal(part, expected[place])


@given(in_parts(), st.data())
def test_segments_are_a_dim_of_their_own(case, data):
    layout, shape = case
    layout = layout.normalized(shape)
    counts = tuple(
        data.draw(st.sampled_from([n for n in range(1, size + 1) if size % n == 0]))
        for size in shape
    )
    if data.draw(st.booleans()):
        counts = layout.segments
    assume(has_segments(layout, shape, counts))
    sizes, plain = without_segments(layout, shape, counts)
    assert set(plain.segments) == {1}
    flat = [
        part.ravel().tolist() for part in scatter(plain, numbered(shape).reshape(sizes)).values()
    ]
    assert flat == [part.ravel().tolist() for part in scatter(layout, numbered(shape)).values()]


@settings(max_examples=200)
@given(in_parts(pending=True), st.data())
def test_any_layout_becomes_any_other(case, data):
    source, shape = case
    target, _ = data.draw(in_parts(source.mesh, shape))
    source, target = source.normalized(shape), target.normalized(shape)
    full = numbered(shape)
    sizes = [source.mesh.axis_size(axis) for axis, _ in source.partial]
    parts = np.zeros((*sizes, *shape))
    for at in np.ndindex(*sizes):  # such that every reduction gives `full`
        parts[at] = full
    for place, (_, op) in enumerate(source.partial):
        if op == "sum":
            parts /= sizes[place]
        if op == "product":
            parts[(slice(None),) * place + (slice(1, None),)] = 1
    held = scatter(source, parts)
    ranks = list(held)
    for stage in stages(source, target, shape, 8, Costs()):
        local = [stage.layout.local_shape(stage.shape, rank) for rank in range(len(ranks))]
        held = {at: held[at].reshape(each) for at, each in zip(ranks, local, strict=True)}
        for step in stage.steps:
            held = exchanged(step, held) if isinstance(step, Exchange) else run(step, held)
    expected = scatter(target, full)
    for rank, at in enumerate(ranks):
        found = held[at].reshape(target.local_shape(shape, rank))
        np.testing.assert_allclose(found, expected[at], err_msg=f"{source} -> {target}")


def exchanged(step, held):
    """The parts that each rank gets from the others along the axis, by `sent` and `received`."""
    index = AXES.index(step.axis)
    found, before = {}, (slice(None),) * step.dim
    for at in held:
        peers = [held[(*at[:index], k, *at[index + 1 :])] for k in range(len(step.held))]
        none = peers[0][(*before, slice(0, 0))]
        sent = [
            np.concatenate(
                [none, *(part[(*before, each)] for each in step.slices_for(peer, at[index]))],
                step.dim,
            )
            for peer, part in enumerate(peers)
        ]
        taken, parts = [0] * len(sent), [none]
        for owner, size in step.owners_of(at[index]):
            begin, taken[owner] = taken[owner], taken[owner] + size
            parts.append(sent[owner][(*before, slice(begin, taken[owner]))])
        found[at] = np.concatenate(parts, step.dim)
    return found


# --- products, whose first dims torch flattens ----------------------------------------------------


@st.composite
def batches(draw):
    """Rows, sharded by one axis, and heads, sharded by the others; each rank has some of both."""
    sizes = draw(st.lists(st.integers(2, 3), min_size=2, max_size=3))
    mesh = Mesh(sizes, AXES[: len(sizes)])
    rows, heads = draw(st.integers(2, 9)), draw(st.integers(2, 9))
    axes = draw(st.permutations(mesh.axis_names))
    layout = Layout(mesh, (axes[:1], axes[1:], None, None))
    assume(all(map(all, (layout.local_shape((rows, heads, 3, 5), n) for n in range(mesh.size)))))
    return layout, (rows, heads, 3, 5)


def reshaped(layout, shape, target):
    found = reshape(shape, target, sharded_dims(layout, shape, target))
    chosen = choose(found, (PlacedTensor(shape, layout),), (target,))
    is_same(chosen.operands[0], layout, shape)
    parts = [
        [part.ravel().tolist() for part in scatter(each, numbered(of_each)).values()]
        for each, of_each in ((layout, shape), (chosen.results[0], target))
    ]
    assert parts[0] == parts[1], f"{layout} becomes {chosen.results[0]}"
    return chosen.results[0]


def is_same(layout, other, shape):
    """Every rank has the same elements; axes of one rank may shard a dim or not."""
    found = elements_of_ranks(layout, shape)
    assert found == elements_of_ranks(other, shape), f"{layout} and {other} of {shape}"


@given(batches())
def test_a_product_of_rows_and_heads_moves_nothing(case):
    layout, (rows, heads, *sizes) = case
    layout = layout.normalized((rows, heads, *sizes))
    flat = reshaped(layout, (rows, heads, *sizes), (rows * heads, *sizes))
    operands = PlacedTensor((rows * heads, 3, 5), flat), PlacedTensor((rows * heads, 5, 3), flat)
    chosen = choose(rule("b n k, b k m -> b n m"), operands, ((rows * heads, 3, 3),))
    assert chosen.operands == (flat, flat)
    is_same(chosen.results[0], flat, (rows * heads, 3, 3))
    shape = (rows, heads, 3, 3)
    is_same(reshaped(flat, (rows * heads, 3, 3), shape), layout, shape)
    # A dim between both, as of an einsum's batch, and one behind.
    more = Layout(layout.mesh, (layout.spec[0], None, layout.spec[1], None))
    shape = (rows, 2, heads, 5)
    joined = reshaped(more, shape, (rows * 2 * heads * 5,))
    is_same(reshaped(joined, (rows * 2 * heads * 5,), shape), more, shape)
    # Of two operands, each may be sharded by heads only, by rows only, or by both.
    shape, full = (rows, heads, 3, 5), (rows * heads, 3, 5)
    of_heads, of_rows = (
        PlacedTensor(full, reshaped(layout.without(*layout.dim_axes(dim)), shape, full))
        for dim in (0, 1)
    )
    for both in combinations((of_heads, of_rows, operands[1]), 2):
        for pair in (both, both[::-1]):
            found = choose(rule("b - -, b - - -> b - -"), pair, ((rows * heads, 3, 3),))
            is_same(found.results[0], flat, (rows * heads, 3, 3))
            for operand, target in zip(pair, found.operands, strict=True):
                moved = stages(operand.layout, target, operand.shape, 4, Costs())
                assert {step.kind for stage in moved for step in stage.steps} <= {"slice"}


def test_what_no_layout_says_is_sharded_otherwise():
    layout = Layout(Mesh((2, 2), AXES[:2]), (AXES[:2],), blocks=(Segments(4, outer=1),))
    operand = PlacedTensor((8,), layout)
    # The segments of a piece would be sharded between in each of two pieces.
    joined = segmented(1, 0, (1, 1), (2,))
    chosen = choose(joined, (operand, operand), ((16,),))
    held = [scatter(each, numbered((8,))) for each in chosen.operands]
    for at, part in scatter(chosen.results[0], np.tile(numbered((8,)), 2)).items():
        np.testing.assert_array_equal(part, np.concatenate([each[at] for each in held]))
    # Rows in segments, and heads behind them.
    rows = Layout(layout.mesh, ("data", "model"), blocks=(Segments(4), 1))
    chosen = choose(rule("a b -> a*b"), (PlacedTensor((8, 2), rows),))
    held, found = (
        scatter(each, numbered(shape))
        for each, shape in ((chosen.operands[0], (8, 2)), (chosen.results[0], (16,)))
    )
    for at, part in held.items():
        np.testing.assert_array_equal(part.ravel(), found[at])


def test_a_rank_with_one_segment_has_consecutive_elements():
    mesh = Mesh((2, 2), AXES[:2])
    for blocks, size, expected in [
        (Segments(2, outer=1), 8, 1),
        (Segments(2, 2, outer=1), 12, 2),
        (Segments(4, outer=2), 8, 1),
        (Segments(4, outer=1), 8, Segments(4, outer=1)),
    ]:
        assert Layout(mesh, (AXES[:2],), blocks=(blocks,)).normalized((size,)).blocks == (expected,)


AXES = ("data", "model", "expert")
