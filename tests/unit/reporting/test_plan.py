"""The table of a plan shows the layouts that its rules give."""

import json
import re

import pytest

from shardcore.domain.errors import LayoutError
from shardcore.domain.layouts.mesh import Mesh
from shardcore.domain.layouts.path_rules import PathRules
from shardcore.ports.policy import VariableFacts
from shardcore.reporting.cost.plan import plan_report

MESH = Mesh((2, 4), ("data", "model"))
VARIABLES = [
    VariableFacts("b_0/kernel", (8, 30)),
    VariableFacts("b_1/kernel", (8, 16)),
    VariableFacts("norm/gamma", (30,), itemsize=2),
]
OUTPUTS = ["b_0/output", "b_1/output", "norm/output"]


def report(rules, reasons=None):
    return plan_report("mine", MESH, VARIABLES, OUTPUTS, PathRules(rules), reasons or {})


def test_a_row_per_rule_with_the_bytes_of_the_fullest_rank():
    made = report({r"b_\d+/kernel": (None, "model")}, {r"b_\d+/kernel": "columns"})
    first, rest = made.rules
    assert (first.rule, first.spec, first.variables) == (r"b_\d+/kernel", "(None, 'model')", 2)
    assert first.shapes == ((8, 30), (8, 16))
    assert first.bytes_here == 8 * 8 * 4 + 8 * 4 * 4  # 30 columns over 4 ranks: 8, 8, 8, 6
    assert (first.bytes_full, first.reason) == (8 * 46 * 4, "columns")
    assert (rest.rule, rest.bytes_here, rest.bytes_full) == ("", 60, 60)
    assert rest.reason == "no rule matches: replicated"
    assert made.bytes_here == first.bytes_here + 60


def test_a_rule_for_outputs_counts_them_and_stores_nothing():
    made = report({r"b_\d+/output": ("data", "model", None)}, {r"b_\d+/output": "tokens"})
    first, rest = made.rules
    assert (first.outputs, first.variables, first.bytes_here) == (2, 0, 0)
    assert (first.spec, first.reason) == ("('data', 'model', None)", "tokens")
    assert (rest.rule, rest.variables, rest.outputs) == ("", 3, 0)  # outputs need no rule


def test_a_rule_that_matches_nothing_is_shown_with_nothing():
    gone, *_ = report({"gone": ("data",)}).rules
    assert (gone.rule, gone.variables, gone.bytes_here, gone.shapes) == ("gone", 0, 0, ())


@pytest.mark.parametrize("width", [80, 100])
def test_it_fits_the_width(width):
    key = "transformer/encoder/block_[0-9]+/feed_forward_network/expansion/kernel"
    reason = "columns: the first of two layers without communication between them"
    shown = report({key: (None, "model")}, {key: reason}).text(width)
    assert max(map(len, shown.splitlines())) <= width
    assert "transformer" in shown
    assert "…" in shown
    assert reason in re.sub(r"[│\s]+", " ", shown)
    wide = report({key: (None, "model")}, {key: reason}).text(300)
    assert key in wide
    assert "bytes in all" in wide


def test_it_prints_as_a_table_and_is_data():
    made = report({r"b_\d+/kernel": (None, "model")})
    assert r"b_\d+/kernel" in str(made)
    assert "(no rule)" in str(made)
    assert "policy mine, mesh (data=2, model=4)" in str(made)
    assert json.loads(json.dumps(made.to_dict()))["bytes_full"] == made.bytes_full


def test_a_rule_that_does_not_fit_names_rule_and_variable():
    with pytest.raises(LayoutError, match=r"Rule 'norm/gamma' for variable 'norm/gamma': .*2 dims"):
        report({"norm/gamma": (None, "model")})
