"""Plans of redistribution give the target layout, in the fewest and cheapest steps."""

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from shardcore.domain.cost.collective_cost import Link
from shardcore.domain.engine.redistribution import plan
from shardcore.domain.layouts.layout import Layout
from shardcore.domain.layouts.placements import Partial, Shard
from shardcore.testing.simulated_ranks import coordinates, scatter
from tests.unit.domain.engine.redistributed import (
    MESH,
    contributions_to,
    kinds,
    owners,
    single_axis_changes,
)
from tests.unit.domain.generators import layouts, redistributions
from tests.unit.domain.numpy_mesh import reduced, run


@settings(max_examples=300)
@given(redistributions(), st.integers(0, 999), st.sampled_from([1, 10**6]))
def test_a_plan_gives_the_target_layout_of_the_same_tensor(case, seed, itemsize):
    source, target, shape = case
    values = contributions_to(source, shape, seed)
    held = scatter(source, values)
    layout = source
    for step in plan(source, target, shape, itemsize):
        assert step.source == layout
        held = run(step, held)
        layout = step.target
        for rank, at in enumerate(coordinates(source.mesh)):
            assert held[at].shape == layout.local_shape(shape, rank)
    assert layout == target
    expected = scatter(target, reduced(source, values, keep=target))
    for at in expected:
        np.testing.assert_allclose(held[at], expected[at], rtol=1e-12, atol=1e-12)


@settings(max_examples=300)
@given(single_axis_changes(), st.sampled_from([4, 10**6]))
def test_one_axis_takes_one_step_and_the_fewest_bytes(case, itemsize):
    """No algorithm sends less in all.

    A rank must be sent what it holds after and not before. A pending reduction over n ranks
    combines n values of each element, which takes n - 1 messages of it; giving the result to all
    n takes n - 1 more.
    """
    axis, source, target, shape = case
    steps = plan(source, target, shape, itemsize)
    assert len(steps) == (source != target)
    sent = sum(step.bytes_sent(rank) for step in steps for rank in range(source.mesh.size))
    ranks = source.mesh.axis_size(axis)
    if isinstance(source.placement(axis), Partial):
        groups = owners(source, shape).sum() // ranks
        messages = (ranks - 1) * (1 if isinstance(target.placement(axis), Shard) else 2)
        assert sent == itemsize * groups * messages
    else:
        assert sent == itemsize * (owners(target, shape) & ~owners(source, shape)).sum()


@settings(max_examples=150)
@given(redistributions())
def test_parts_are_what_ranks_hold_before_and_after(case):
    source, target, shape = case
    full = np.arange(np.prod(shape, dtype=int)).reshape(shape)
    for step in plan(source, target, shape, itemsize=1):
        before, after = owners(step.source, shape), owners(step.target, shape)
        for group in source.mesh.axis_groups(step.axis):
            for rank in group:
                local = full[step.source.slices(shape, rank)]
                for peer in group:
                    part = local[step.part(rank, peer)]
                    np.testing.assert_array_equal(part.ravel(), full[before[rank] & after[peer]])


@given(st.data())
def test_equal_layouts_take_no_step(data):
    layout = data.draw(layouts(MESH, 2, blocks=True))
    assert plan(layout, layout, (3, 4), itemsize=4) == ()


def test_slices_come_early_and_gathers_late():
    pending = Layout(MESH, (None, None), {"data": "sum"})
    assert kinds(pending, Layout(MESH, ("model", None))) == [
        ("slice", "model"),
        ("all_reduce", "data"),
    ]
    pending = Layout(MESH, ("model", None), {"data": "sum"})
    assert kinds(pending, Layout(MESH, (None, None))) == [
        ("all_reduce", "data"),
        ("all_gather", "model"),
    ]


def test_a_pending_sum_is_scattered_rather_than_reduced_and_sliced():
    pending = Layout(MESH, (None, None), {"data": "sum", "model": "sum"})
    assert kinds(pending, Layout(MESH, ("data", "model"))) == [
        ("reduce_scatter", "data"),
        ("reduce_scatter", "model"),
    ]


def test_a_large_tensor_pending_twice_is_reduced_in_parts():
    pending = Layout(MESH, (None, None), {"data": "sum", "model": "sum"})
    full = Layout.replicated(MESH, 2)
    assert kinds(pending, full, itemsize=10**6) == [
        ("reduce_scatter", "model"),
        ("all_reduce", "data"),
        ("all_gather", "model"),
    ]
    assert [kind for kind, _ in kinds(pending, full)] == ["all_reduce", "all_reduce"]


def test_the_minor_axis_is_gathered_first():
    nested = Layout(MESH, (("data", "model"), None))
    assert kinds(nested, Layout.replicated(MESH, 2)) == [
        ("all_gather", "model"),
        ("all_gather", "data"),
    ]


def test_a_small_tensor_takes_few_collectives_and_a_large_one_few_bytes():
    nested, swapped = (
        Layout(MESH, (axes, None)) for axes in (("data", "model"), ("model", "data"))
    )
    small = plan(nested, swapped, (64, 64), itemsize=4)
    large = plan(nested, swapped, (65536, 65536), itemsize=4)
    collectives = [sum(step.kind != "slice" for step in steps) for steps in (small, large)]
    assert collectives == [2, 3]
    gathered = 65536 * 65536 * 4
    assert sum(step.bytes_sent(0) for step in large) < gathered // 2


BLOCKS = (1, 2, 4)


def moves_from(mesh, state, elements, itemsize):
    """The states that one step gives, and its cost.

    A state is the axes of each dim with its blocks, and the pending axes; shards are even.
    """
    of_dims, pending = state
    size = dict(zip(mesh.axis_names, mesh.shape, strict=True))
    local = elements // np.prod([size[a] for axes, _ in of_dims for a in axes], dtype=int)
    found = {}
    for axis, n in size.items():
        inside = [axes for axes, _ in of_dims if axis in axes]
        if inside and inside[0][-1] != axis:
            continue
        out = [(tuple(a for a in axes if a != axis), block) for axes, block in of_dims]
        out = [(axes, block if axes else 1) for axes, block in out]
        targets = [(None, 1)]
        for dim, (axes, block) in enumerate(out):
            targets += [(dim, each) for each in ([block] if axes else BLOCKS)]
        for dim, block in targets:
            after = tuple(
                ((*axes, axis), block) if d == dim else (axes, kept)
                for d, (axes, kept) in enumerate(out)
            )
            if axis in pending:
                sent = local * (n - 1) // n * (2 if dim is None else 1)
            elif inside:
                sent = local * (n - 1) if dim is None else local * (n - 1) // n
            reached = (after, pending - {axis})
            if reached != state:
                moves = inside or axis in pending
                found[reached] = Link().seconds(sent * itemsize) if moves else 0
    return found


def cheapest_costs(mesh, state, elements, itemsize):
    """The least cost of every state from one on, by relaxing all edges until nothing changes."""
    costs = {state: 0}
    todo = [state]
    while todo:
        state = todo.pop()
        for reached, cost in moves_from(mesh, state, elements, itemsize).items():
            if costs[state] + cost < costs.get(reached, np.inf):
                costs[reached] = costs[state] + cost
                todo.append(reached)
    return costs


@settings(max_examples=60)
@given(st.data(), st.sampled_from([1, 64, 4096]))
def test_no_path_is_cheaper_when_both_axes_move(data, itemsize):
    def drawn(pending):
        layout = data.draw(layouts(MESH, 2, pending))
        blocks = [data.draw(st.sampled_from(BLOCKS)) if entry else 1 for entry in layout.spec]
        return Layout(MESH, layout.spec, dict.fromkeys(dict(layout.partial), "sum"), blocks)

    def state(layout):
        of_dims = tuple((layout.dim_axes(dim), layout.blocks[dim]) for dim in range(2))
        return of_dims, frozenset(dict(layout.partial))

    source, target = drawn(pending=True), drawn(pending=False)
    moving = [a != b for a, b in zip(source.placements, target.placements, strict=True)]
    swapped = source.in_mesh_order != target.in_mesh_order
    assume(all(moving) or (swapped and not any(moving)))
    total = 0
    for step in plan(source, target, (64, 64), itemsize):
        cost = moves_from(MESH, state(step.source), 64 * 64, itemsize)[state(step.target)]
        # Even parts are the same in any blocks, and are not sent from one block size to another.
        bytes_sent = cost and round((cost - Link().latency) * Link().bandwidth)
        in_other_blocks = step.source_dim is not None and step.source_dim == step.target_dim
        assert step.bytes_sent(0) == (0 if in_other_blocks else bytes_sent)
        assert (step.kind == "slice") == (cost == 0)
        total += cost
    least = cheapest_costs(MESH, state(source), 64 * 64, itemsize)[state(target)]
    assert total == pytest.approx(least)
