"""`make gpu`: what it runs, where ranks compute, and what the page says of a run."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.compat import lanes
from tests.compat.environments import ROOT
from tests.gpu import page, parts


def test_every_part_has_tests():
    for chosen in parts.PARTS.values():
        assert all((ROOT / each).exists() for each in chosen if "/" in each)


def test_all_parts_together_are_under_half_an_hour():
    limits = {part: parts.LIMITS[part] + lanes.TO_REPORT_SECONDS for part in parts.PARTS}
    assert sum(limits.values()) <= 30 * 60
    assert sum(list(limits.values())[:4]) <= 15 * 60
    assert 2 * parts.LIMITS[parts.TWO] <= 10 * 60


def test_torch_is_asked_for_devices_without_loading_cuda():
    assert parts.environment()["PYTORCH_NVML_BASED_CUDA_CHECK"] == "1"


@pytest.mark.parametrize(("part", "value"), [("launch", None), ("layers", "1")])
def test_the_part_that_launches_looks_for_devices_as_users_do(monkeypatch, tmp_path, part, value):
    monkeypatch.setattr(parts, "RESULTS", tmp_path)
    monkeypatch.setattr(parts, "outcome", lambda python, tests, variables, *_: variables)
    monkeypatch.setenv("PYTORCH_NVML_BASED_CUDA_CHECK", "1")  # as tests.gpu has set it
    assert parts._tests(part).get("PYTORCH_NVML_BASED_CUDA_CHECK") == value


def test_without_a_gpu_it_prints_a_line_and_succeeds():
    pytest.importorskip("torch")
    command = [sys.executable, "-m", "tests.gpu"]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    assert done.stdout == "make gpu: torch sees no CUDA device here, so nothing was run.\n"
    assert done.returncode == 0


def test_a_part_by_itself_leaves_the_results_of_the_others(monkeypatch, tmp_path):
    machine = {"devices": "1 × H200"}
    monkeypatch.setattr(parts, "RESULTS", tmp_path)
    monkeypatch.setattr(parts, "_machine", lambda: dict(machine))
    monkeypatch.setattr(parts, "_tests", lambda part: {"passed": len(part)})
    (found,) = parts.run(["counts"])
    assert found["parts"] == {"counts": {"passed": 6}}
    *_, found = parts.run(["layers"])
    assert found["parts"].keys() == {"counts", "layers"}
    machine["devices"] = "2 × H100"
    first, second = (set(found["parts"]) for found in parts.run(["contract", "counts"]))
    assert (first, second) == ({"contract"}, {"contract", "counts"})  # each has its row at once


def test_two_gpus_make_one_file_to_send(monkeypatch, tmp_path):
    monkeypatch.setattr(parts, "RESULTS", tmp_path)
    monkeypatch.setattr(parts, "TWO_FILE", tmp_path / "two.json")
    monkeypatch.setattr(parts, "_machine", lambda: {"devices": "2 × Tesla T4"})
    counts = {"passed": 9, "failed": [], "skipped": 1, "seconds": 3}
    monkeypatch.setattr(parts, "_tests", lambda part: dict(counts))

    def two(command, variables, limit):
        assert "PYTORCH_NVML_BASED_CUDA_CHECK" not in variables
        Path(command[-1]).write_text(json.dumps({"runs": [], "failed": ["other losses"]}))

    monkeypatch.setattr(parts, "within", two)
    monkeypatch.setenv("PYTORCH_NVML_BASED_CUDA_CHECK", "1")  # as tests.gpu has set it
    (found,) = parts.run(["two"])
    part = found["parts"]["two"]
    assert (part["passed"], part["failed"], part["skipped"]) == (9, ["other losses"], 1)
    sent = json.loads((tmp_path / "two.json").read_text())
    assert sent["machine"] == {"devices": "2 × Tesla T4"}
    assert sent["counts"]["passed"] == 9


def test_the_page_has_the_machine_what_failed_and_the_figures():
    part = {"failed": ["a::b"], "skipped": 2, "passed": 9, "seconds": 3}
    figure = {"section": "MLP", "contender": "captured", "value": 0.0123456, "unit": "s"}
    nothing = {"section": "CNN", "contender": "plain", "value": None, "unit": "s"}
    found = {
        "machine": {"devices": "2 × H100", "torch": "2.13.0", "CUDA": "13.0"},
        "day": "2026-11-25",
        "parts": {"contract": part},
        "figures": [
            {**figure, "ratio": 0.5, "against": "plain", "note": ""},
            {**nothing, "ratio": None, "against": "", "note": "out of memory"},
        ],
    }
    text = "\n".join(page.lines(found))
    assert text.startswith("2 × H100; torch 2.13.0, CUDA 13.0; 2026-11-25.\n")
    assert "| contract | 9 | 1 | 2 | 3 |" in text
    assert "- `a::b`" in text
    assert "| MLP | captured | 12.3 ms | 0.50 × plain |" in text
    assert "| CNN | plain | out of memory |  |" in text


def test_the_page_has_the_marks_between_which_a_run_is_written():
    before, begin, rest = page.PAGE.read_text().partition(page.BEGIN)
    assert before
    assert begin
    assert page.END in rest
