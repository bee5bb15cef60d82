import re
from pathlib import Path

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from shardcore.domain.errors import LayoutError
from shardcore.domain.layout import Layout
from shardcore.domain.machines.collective_cost import Costs, Link
from shardcore.domain.mesh import Mesh
from shardcore.domain.placements import Partial, Replicate, Shard
from shardcore.domain.redistribution.plan import TRANSITIONS, plan, transition
from tests.unit.domain.generators import block_sizes, layouts, redistributions
from tests.unit.domain.numpy_mesh import coordinates, reduced, run, scatter

DOCS = Path(__file__).parents[4] / "docs" / "reference" / "transitions.md"
MESH = Mesh((2, 4), ("data", "model"))
LINE = Mesh((4,), ("model",))


def contributions_to(layout, shape, seed):
    sizes = [layout.mesh.axis_size(axis) for axis, _ in layout.partial]
    # Small and never zero, so that no reduction hides another.
    return np.random.default_rng(seed).choice([1.0, 2.0, -1.0, 3.0], size=(*sizes, *shape))


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


def owners(layout, shape):
    """Per rank, which elements of the global tensor it holds."""
    masks = np.zeros((layout.mesh.size, *shape), dtype=bool)
    for rank in range(layout.mesh.size):
        masks[(rank, *layout.slices(shape, rank))] = True
    return masks


@st.composite
def single_axis_changes(draw):
    """Two layouts that differ in what one axis, the last of its dims, does."""
    source, _, shape = draw(redistributions())
    pending = dict.fromkeys(dict(source.partial), "sum")
    source = Layout(source.mesh, source.spec, pending, source.blocks)
    axis = draw(st.sampled_from(source.mesh.axis_names))
    fixed = source.without(axis)
    rest = {a: op for a, op in source.partial if a != axis}

    def placed(where):
        of_dims = [
            fixed.dim_axes(dim) + ((axis,) if dim == where else ()) for dim in range(len(shape))
        ]
        # Blocks can be others only where no other axis shards the dim.
        blocks = [
            draw(block_sizes) if dim == where and not fixed.spec[dim] else fixed.blocks[dim]
            for dim in range(len(shape))
        ]
        pending = rest | ({axis: "sum"} if where == "partial" else {})
        return Layout(source.mesh, of_dims, pending, blocks)

    places = ["whole", *range(len(shape))]
    before = draw(st.sampled_from([*places, "partial"]))
    after = draw(st.sampled_from(places))
    return axis, placed(before), placed(after), shape


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
    whole = np.arange(np.prod(shape, dtype=int)).reshape(shape)
    for step in plan(source, target, shape, itemsize=1):
        before, after = owners(step.source, shape), owners(step.target, shape)
        for group in source.mesh.axis_groups(step.axis):
            for rank in group:
                local = whole[step.source.slices(shape, rank)]
                for peer in group:
                    part = local[step.part(rank, peer)]
                    np.testing.assert_array_equal(part.ravel(), whole[before[rank] & after[peer]])


@given(st.data())
def test_equal_layouts_take_no_step(data):
    layout = data.draw(layouts(MESH, 2, blocks=True))
    assert plan(layout, layout, (3, 4), itemsize=4) == ()


def kinds(source, target, shape=(8, 8), itemsize=4):
    return [(step.kind, step.axis) for step in plan(source, target, shape, itemsize)]


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
    whole = Layout.replicated(MESH, 2)
    assert kinds(pending, whole, itemsize=10**6) == [
        ("reduce_scatter", "model"),
        ("all_reduce", "data"),
        ("all_gather", "model"),
    ]
    assert [kind for kind, _ in kinds(pending, whole)] == ["all_reduce", "all_reduce"]


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


def test_axes_that_need_not_move_do_not():
    # Over an idle axis one could slice first, reduce less, and gather again: fewer bytes, but what
    # one axis does would then depend on the others.
    source = Layout(MESH, (None, None), {"model": "sum"})
    steps = plan(source, Layout.replicated(MESH, 2), (8, 8), itemsize=10**9)
    assert [str(step) for step in steps] == ["all_reduce over 'model': P(sum) -> R"]


def test_an_axis_of_one_rank_needs_no_collective():
    mesh = Mesh((1, 2), ("data", "model"))
    source = Layout(mesh, ("model", None), {"data": "sum"})
    steps = plan(source, Layout(mesh, (None, "data")), (8, 8), itemsize=4)
    assert sorted(step.kind for step in steps) == ["all_gather", "slice"]


def test_uneven_bytes_are_exact():
    def sent(source, target):
        (step,) = plan(Layout(LINE, *source), Layout(LINE, *target), (5, 3), itemsize=1)
        return [step.bytes_sent(rank) for rank in range(4)]

    whole, rows, columns = (None, None), ("model", None), (None, "model")
    # Rows 2, 2, 1, 0; columns 1, 1, 1, 0; flat chunks 4, 4, 4, 3.
    assert sent([rows], [whole]) == [18, 18, 9, 0]
    assert sent([whole], [rows]) == [0, 0, 0, 0]
    assert sent([rows], [columns]) == [4, 4, 2, 0]
    assert sent([whole, {"model": "sum"}], [rows]) == [9, 9, 12, 15]
    assert sent([whole, {"model": "sum"}], [whole]) == [23, 23, 23, 21]


def test_only_elements_that_change_blocks_are_sent():
    pair = Mesh((2,), ("model",))
    # 20 elements in blocks of 4 are 12 and 8, of 6 they are 12 and 8, of 1 they are 10 and 10.
    fours, sixes, ones = (Layout(pair, ("model",), blocks=(block,)) for block in (4, 6, 1))
    (step,) = plan(fours, ones, (20,), itemsize=8)
    assert str(step) == "all_to_all over 'model': S(0, block=4) -> S(0)"
    assert step.source_dim == step.target_dim == 0
    assert [step.bytes_sent(rank) for rank in range(2)] == [2 * 8, 0]
    (step,) = plan(ones, fours, (20,), itemsize=8)
    assert [step.bytes_sent(rank) for rank in range(2)] == [0, 2 * 8]
    (step,) = plan(fours, sixes, (20,), itemsize=8)
    assert [step.bytes_sent(rank) for rank in range(2)] == [0, 0]


def test_all_axes_of_a_dim_in_other_blocks_move_and_no_axis_of_another_dim():
    def planned(spec, blocks, to_spec, to_blocks):
        source, target = (
            Layout(MESH, each, blocks=b) for each, b in ((spec, blocks), (to_spec, to_blocks))
        )
        return kinds(source, target, shape=(40, 40))

    nested = (("data", "model"), None)
    assert planned(nested, (4, 1), nested, (1, 1)) == [
        ("all_gather", "model"),
        ("all_to_all", "data"),
        ("slice", "model"),
    ]
    apart = ("data", "model")
    assert planned(apart, (4, 3), apart, (1, 3)) == [("all_to_all", "data")]


def test_an_axis_enters_a_dim_in_the_blocks_that_it_has():
    rows = Layout(MESH, ("data", None), blocks=(4, 1))
    assert kinds(rows, Layout(MESH, (("data", "model"), None), blocks=(4, 1))) == [
        ("slice", "model")
    ]
    assert kinds(rows, Layout(MESH, (("data", "model"), None))) == [
        ("all_to_all", "data"),
        ("slice", "model"),
    ]


def test_every_rank_and_every_call_gets_the_same_plan():
    source = Layout(MESH, (("data", "model"), None))
    target = Layout(MESH, (None, ("model", "data")))
    assert plan(source, target, [8, 8], 4) == plan(source, target, (8, 8), 4)


@pytest.mark.parametrize(
    ("source", "target", "shape", "message"),
    [
        (("data",), (None,), (3, 3), r"shape \(3, 3\), but its layout \('data',\) is of 1 dims"),
        (("data",), (None, None), (3,), r"\(None, None\) is of 2 dims"),
    ],
)
def test_a_shape_that_does_not_fit_is_an_error(source, target, shape, message):
    with pytest.raises(LayoutError, match=message):
        plan(Layout(MESH, source), Layout(MESH, target), shape, itemsize=4)


@pytest.mark.parametrize("before", [{}, {"data": "avg"}])
def test_nothing_becomes_partial(before):
    target = Layout(MESH, (None,), {"data": "sum"})
    with pytest.raises(LayoutError, match=r"axis 'data': No step leads from .* to P\(sum\)"):
        plan(Layout(MESH, (None,), before), target, (4,), itemsize=4)


def test_layouts_of_two_meshes_are_an_error():
    other = Mesh((4, 2), ("data", "model"))
    with pytest.raises(LayoutError, match=r"one mesh, got \(data=2, model=4\) and \(data=4,"):
        plan(Layout(MESH, (None,)), Layout(other, (None,)), (4,), itemsize=4)


PLACEMENTS = {"R": Replicate(), "S(i)": Shard(0), "S(j)": Shard(1), "P": Partial()}


def rows_of_the_docs():
    """Per row of the table in the docs: source, target, kind or none, and the bytes formula."""
    row = r"^\| `(\S+)` \| `(\S+)` \| (.+?) \| `(.+)` \|$"
    return re.findall(row, DOCS.read_text(encoding="utf-8"), re.MULTILINE)


def test_the_docs_have_every_transition_once():
    rows = [(PLACEMENTS[a], PLACEMENTS[b]) for a, b, _, _ in rows_of_the_docs()]
    assert len(set(rows)) == len(rows)
    moves = {(type(a), type(b)) for a, b in rows if a != b}
    assert moves == set(TRANSITIONS)
    assert {(a, b) for a, b in rows if a == b} == {
        (p, p) for name, p in PLACEMENTS.items() if name != "S(j)"
    }


@pytest.mark.parametrize("row", rows_of_the_docs(), ids=" ".join)
def test_the_docs_say_what_is_done_and_what_it_sends(row):
    source, target, kind, formula = row
    before, after = PLACEMENTS[source], PLACEMENTS[target]
    assert kind == (f"`{transition(before, after)}`" if before != after else "nothing")
    shape, itemsize = (8, 8), 4
    layout = [Layout.from_placements(LINE, [p], 2) for p in (before, after)]
    sent = [sum(s.bytes_sent(r) for s in plan(*layout, shape, itemsize)) for r in range(4)]
    expected = eval(formula, {"n": 4, "B": 8 * 8 * 4})  # an arithmetic formula of our own docs
    assert sent == [expected] * 4


def test_the_example_in_the_docs_prints_what_it_says(capsys):
    (code,) = re.findall(r"```python\n(.*?)```", DOCS.read_text(encoding="utf-8"), re.DOTALL)
    exec(code, {})
    printed = capsys.readouterr().out.splitlines()
    assert printed == [line[2:] for line in code.splitlines() if line.startswith("# ")]


@pytest.mark.parametrize("slow", ["data", "model"])
def test_the_larger_sum_goes_over_the_faster_link(slow):
    mesh = Mesh((2, 2), ("data", "model"))
    source = Layout(mesh, (None, None), partial={"data": "sum", "model": "sum"})
    costs = Costs({slow: Link(bandwidth=1e6)})
    first, second = plan(source, Layout(mesh, ("data", "model")), (64, 64), 4, costs)
    assert (first.bytes_sent(0), second.bytes_sent(0)) == (8192, 4096)
    assert second.axis == slow
