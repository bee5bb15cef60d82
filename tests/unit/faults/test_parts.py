"""`make faults`: the tests that it names are there, and its table counts kinds."""

import ast

import pytest

from tests.compat.environments import ROOT
from tests.faults import page, processes
from tests.faults.kinds import Kind, grouped

NAMED = [(file, names) for files in processes.TESTS.values() for file, names in files.items()]


@pytest.mark.parametrize(("file", "names"), NAMED)
def test_the_functions_of_a_part_are_in_their_file(file, names):
    tree = ast.parse((ROOT / processes.DISTRIBUTED / file).read_text())
    there = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
    assert set(names) <= there


def test_a_kind_holds_if_each_of_its_cases_does():
    cases = [("cut", "error"), ("flipped", "read"), ("cut", "a hang"), ("cut", "read")]
    assert grouped(cases, ("error", "read")) == [
        Kind("cut", 3, 2, ("case 2: a hang",)),
        Kind("flipped", 1, 1),
    ]


def test_the_table_counts_kinds_and_not_repetitions():
    kinds = [
        {"name": "a", "tried": 200, "held": 200, "problems": []},
        {"name": "b", "tried": 3, "held": 2, "problems": ["lost"]},
    ]
    part = {"kinds": kinds, "seconds": 9, "day": "2026-11-27", "commit": "c", "has_ended": True}
    found = {"versions": {"Keras": "3"}, "parts": {"saves": part}}
    lines = list(page.table(found))
    assert "| saves | 2 | 1 | 203 | 9 | 2026-11-27 | `c` |" in lines
    assert "- saves: b: 2 of 3; lost" in lines
    assert not page.has_held(found, ["saves"])
    kinds[1]["held"] = 3
    assert page.has_held(found, ["saves"])
    assert not any("Not held" in line for line in page.table(found))
