"""The bytes that steps send: compared, stored, and written on a page."""

import json
import math

import pytest

from benchmarks.traffic import (
    answers,
    comparison,
    models,
    page,
    stored,
    table,
)
from benchmarks.traffic.answers import Counted, Found
from benchmarks.traffic.comparison import DEFAULT, EAGER, Row
from benchmarks.traffic.sends_more import Reason
from benchmarks.traffic.sent_bytes import Traffic


def test_a_step_that_is_not_captured_says_why() -> None:
    step = Counted({}, {})
    found = answers.answer([Found(None, step, "reads\nvalues"), Found(step, step)])
    assert found == {"eager": {"sent": 0, "calls": {}}, "reason": "reads values"}


def step(sent: float, **calls: int) -> dict:
    return {"sent": sent, "calls": calls}


XLA = {
    "A": step(100, all_reduce=1),
    "B": step(0),
    "C": step(0),
    "D": step(50, all_gather=3),
    "E": {"failure": "ModuleNotFoundError: No module named 'torch'"},
    "F": step(10, all_reduce=1),
}
OURS = {
    "A": {"captured": step(400, all_reduce=2), "eager": step(100, all_reduce=3)},
    "B": {"captured": step(0), "eager": step(0)},
    "C": {"captured": step(8, all_reduce=1), "eager": step(8, all_reduce=1)},
    "D": {"eager": step(0), "reason": "it reads values"},
    "E": {"captured": step(1), "eager": step(1)},
    "F": {"failure": "KeyError: 3"},
}


def test_only_what_both_can_train_is_compared() -> None:
    assert [row.case for row in comparison.rows(OURS, XLA)] == ["A", "B", "C", "D"]


def test_a_summary_leaves_out_of_the_mean_what_one_side_alone_sends() -> None:
    found = comparison.summarize(comparison.rows(OURS, XLA))
    assert (found.cases, found.at_most) == (4, 2)
    assert found.mean == pytest.approx(math.sqrt(4 * 1))  # of A and B
    assert (found.neither, found.only_ours, found.only_xla) == (1, 1, 1)
    assert found.not_captured == 1
    assert (found.calls, found.xla_calls) == (2 + 1, 1 + 3)


def test_eager_steps_have_a_summary_of_their_own() -> None:
    rows = comparison.rows(OURS, XLA)
    assert comparison.summarize(rows, EAGER).mean == pytest.approx(1)
    assert comparison.summarize(rows, DEFAULT).mean == pytest.approx(2)


def test_the_worst_cases_come_first() -> None:
    rows = comparison.rows(OURS, XLA)
    better = [Row("D", Traffic(50), Traffic(75), Traffic(75), True)]
    assert comparison.worst([rows, better]) == ["C", "A", "D", "B"]


@pytest.fixture
def results(tmp_path, monkeypatch) -> None:
    """Results of both meshes, as whole runs store them."""
    monkeypatch.setattr(stored, "FOLDER", tmp_path)
    for mesh in models.MESHES:
        stored.store(stored.XLA, mesh, {"jax": "1.2"}, XLA)
        stored.store("manual", mesh, {"torch": "3.4"}, OURS)


@pytest.mark.usefixtures("results")
def test_results_are_read_as_they_were_stored(tmp_path) -> None:
    assert stored.load("manual", "1x2") == OURS
    assert stored.origin("manual", "1x2").endswith(", torch 3.4")
    assert stored.load("absent", "1x2") == {}
    text = (tmp_path / "traffic-manual.json").read_text()
    assert set(json.loads(text)) == {"1x2", "2x1"}
    assert '   "B": {"captured": {"sent": 0, "calls": {}}, "eager"' in text


@pytest.mark.usefixtures("results")
def test_a_mesh_that_runs_again_leaves_the_others() -> None:
    stored.store("manual", "2x1", {}, {})
    assert stored.load("manual", "2x1") == {}
    assert stored.load("manual", "1x2") == OURS


@pytest.mark.usefixtures("results")
def test_the_page_has_a_summary_and_every_case() -> None:
    text = page.page(["manual"], ["Hashing"])
    lines = text.splitlines()
    assert "| `1x2` | `manual` | default | 2 of 4 | 2.00 | 3 : 4 | 1 | 1 | 1 | 1 |" in lines
    assert "| `1x2` | `manual` | eager | 3 of 4 | 1.00 | 4 : 4 | 1 | 1 | 1 |  |" in lines
    assert "| `A` | 100 (1) | 400 (2) | 4.00 | 100 (3) |" in lines
    assert "| `C` | 0 (0) | 8 (1) | ∞ |  |" in lines
    assert "| `D` | 50 (3) | 0 (0), eager | 0.00 |  |" in lines
    assert "- `1x2`, Keras on JAX refuses: `E` (torch)." in lines
    assert "- `1x2`, `manual` fails: `F`: KeyError: 3" in lines
    assert "`manual` runs eagerly: `D`: it reads values." in lines
    assert "`Hashing`" in text


@pytest.mark.usefixtures("results")
def test_the_page_says_why_a_case_is_above_xla() -> None:
    reasons = [Reason("1x2", ("A",), "its sums are in float64")]
    lines = page.page(["manual"], [], reasons).splitlines()
    first = lines.index("### Above XLA on 1x2, and why")
    assert lines[first + 2 : first + 4] == [
        "- `A`: its sums are in float64.",
        "- `C`: not explained yet.",
    ]
    stale = [Reason("1x2", ("A", "B"), "its sums are in float64")]
    with pytest.raises(ValueError, match="B: not above XLA on 1x2"):
        page.page(["manual"], [], stale)


@pytest.mark.usefixtures("results")
def test_the_page_comes_before_any_run() -> None:
    assert "`dtensor` on `2x1`, `1x2`: not run" in page.page(["dtensor"], [])


def test_a_mesh_has_a_line_for_each_strategy_and_step() -> None:
    rows = comparison.rows(OURS, XLA)
    found = table.summary({"1x2": {"manual": rows}})
    assert found[0] == ("1x2", "manual", "default", "2 of 4", "2.00", "3 : 4", "1", "1")
    assert [(line[2], line[-1]) for line in found] == [("default", "1"), ("eager", "")]
    assert table.cells_of("A", {"manual": rows}) == ["A", "100", "400", "4.00"]


def test_stand_ins_are_removed_after_the_import() -> None:
    with models.stand_ins("no_such_package"):
        from no_such_package.part import Anything  # type: ignore[import-not-found]
    assert isinstance(Anything, type)
    with pytest.raises(ImportError):
        import no_such_package  # noqa: F401
