"""Steps of redistribution: blocks, bytes, errors, and the documented transitions."""

import re
from pathlib import Path

import pytest

from shardcore.domain.cost.collective_cost import Costs, Link
from shardcore.domain.engine.redistribution import TRANSITIONS, plan, transition
from shardcore.domain.errors import LayoutError
from shardcore.domain.layouts.layout import Layout
from shardcore.domain.layouts.mesh import Mesh
from shardcore.domain.layouts.placements import Partial, Replicate, Shard
from tests.unit.domain.engine.redistributed import MESH, kinds

DOCS = Path(__file__).parents[4] / "docs" / "reference" / "transitions.md"
LINE = Mesh((4,), ("model",))


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

    full, rows, columns = (None, None), ("model", None), (None, "model")
    # Rows 2, 2, 1, 0; columns 1, 1, 1, 0; flat chunks 4, 4, 4, 3.
    assert sent([rows], [full]) == [18, 18, 9, 0]
    assert sent([full], [rows]) == [0, 0, 0, 0]
    assert sent([rows], [columns]) == [4, 4, 2, 0]
    assert sent([full, {"model": "sum"}], [rows]) == [9, 9, 12, 15]
    assert sent([full, {"model": "sum"}], [full]) == [23, 23, 23, 21]


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
