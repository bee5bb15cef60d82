"""The tables and pages of the benchmarks."""

import doctest
import json
import math

import pytest

from benchmarks import cases, many_ranks, page, plans, rounds, rows, table, worlds
from benchmarks.contender import CAPTURED, Contender, Goal
from benchmarks.rounds import Measured
from benchmarks.rows import Row

PEER = "DDP"
RACING = [
    Contender(PEER, None),
    Contender(CAPTURED, None, (Goal(PEER, 1.0), Goal("absent", 1.0)), captured=True),
]
RUN = {
    "machine": {"day": "2026-11-22", "load_before": 0.1, "load_after": 2.0},
    "rows": [table.as_dict(Row("MLP", CAPTURED, 0.5, "s", PEER, 1.25, 1.0))],
}


def found(**changed):
    """Two contenders; every second round the machine was twice as slow."""
    peer = Measured(PEER, seconds=[1.0, 2.0, 1.0, 2.0, 1.0])
    mine = Measured(CAPTURED, seconds=[0.9, 1.8, 0.9, 1.8, 1.8], **{"layer_calls": 0, **changed})
    return {PEER: peer, CAPTURED: mine}


@pytest.mark.parametrize("module", [cases, page, plans, table, worlds])
def test_examples(module) -> None:
    failed, attempted = doctest.testmod(module)
    assert attempted
    assert not failed


def test_a_ratio_is_that_of_rounds_that_were_run_together() -> None:
    measured = found()
    assert measured[CAPTURED].ratio(measured[PEER]) == pytest.approx(0.9)
    assert measured[CAPTURED].step / measured[PEER].step == pytest.approx(1.8)


def test_each_goal_that_takes_part_is_a_line() -> None:
    peer, mine = rows.times("MLP", RACING, found())
    assert (peer.value, peer.against, peer.verdict) == (1.0, "", "")
    assert (mine.value, mine.against, mine.ratio) == (1.8, PEER, pytest.approx(0.9))
    assert mine.verdict == "met"


def test_a_captured_step_that_ran_in_python_meets_no_goal() -> None:
    mine = list(rows.times("MLP", RACING, found(layer_calls=8)))[1]
    assert (mine.verdict, mine.note) == ("missed", rows.RAN_IN_PYTHON)


def test_a_failed_contender_has_no_figure() -> None:
    mine = list(rows.times("MLP", RACING, found(failure="it broke")))[1]
    assert (mine.value, mine.ratio, mine.verdict, mine.note) == (None, None, "", "it broke")


@pytest.mark.parametrize(("other", "agrees"), [(2.00009, True), (2.0002, False)])
def test_losses_agree_to_a_tolerance(other: float, agrees: bool) -> None:
    reference = Measured(PEER, losses=[3.0, 2.0])
    assert (not rounds.disagreement([3.0, other], reference)) == agrees


def test_losses_that_are_no_numbers_do_not_agree() -> None:
    assert rounds.disagreement([math.nan], Measured(PEER, losses=[math.nan]))


def test_memory_is_compared_with_theory_and_with_the_peer() -> None:
    measured = found(memory={"stored": 60, "share": 50, "step": 30, "process": 90})
    measured[PEER].memory = {"stored": 50, "share": 50, "step": 20, "process": 100}
    lines = {row.contender: row for row in rows.memory("MLP", PEER, measured)}
    assert [lines[f"{CAPTURED}: {what}"].ratio for what in _MEMORY] == [1.2, 1.5, 0.9]
    assert [lines[f"{CAPTURED}: {what}"].verdict for what in _MEMORY] == ["missed", "missed", "met"]
    assert lines[f"{PEER}: peak of step"].ratio is None


_MEMORY = ("stored", "peak of step", "peak of process")


def test_fully_sharded_gathers_twice_and_reduces_once() -> None:
    kernel, bias = (1024, 1024), (1024,)
    moved = worlds.formula(cases.SMALL, "fully sharded", 8, {"kernel": kernel, "bias": bias})
    kernel_bytes, bias_bytes = 4 * 1024 * 1024, 4 * 1024
    assert moved.operand_bytes == kernel_bytes + 2 * kernel_bytes // 8 + bias_bytes + worlds.LOSS
    assert moved.calls == 3 + 2


def test_a_page_has_a_table_for_each_section() -> None:
    text = "\n".join(page.lines(RUN))
    assert "### MLP" in text
    assert "| shardcore captured | 500.0 ms | 1.25 | DDP | ≤ 1 | missed |" in text


def test_sections_that_were_not_run_stay_on_the_page(tmp_path, monkeypatch) -> None:
    place = tmp_path / "page.md"
    place.write_text(f"text\n{page.BEGIN}\n\n### MLP\n\nold\n\n### CNN\n\nkept\n{page.END}\nend\n")
    monkeypatch.setattr(page, "PAGE", place)
    monkeypatch.setattr(page, "FOLDER", tmp_path)
    (tmp_path / "mlp.json").write_text(json.dumps(RUN))
    page.main()
    assert "old" not in place.read_text()
    assert "| shardcore captured | 500.0 ms |" in place.read_text()
    assert place.read_text().endswith(f"### CNN\n\nkept\n{page.END}\nend\n")


def test_growing_figures_are_compared_with_those_of_the_fewest_ranks(monkeypatch) -> None:
    grows = many_ranks.Measure("figure", (2, 4, 8), "B", lambda ranks, strategy: ranks * 10, 3.0)
    monkeypatch.setattr(many_ranks, "MEASURES", (grows,))
    found = list(many_ranks.rows(False, "dtensor"))
    assert [(each.value, each.ratio, each.verdict) for each in found] == [
        (20, 1.0, ""),
        (40, 2.0, ""),
        (80, 4.0, "missed"),
    ]
    assert len(list(many_ranks.rows(True, "dtensor"))) == 2
