"""The choice of the rule for a path, the report of rules, and the documented examples."""

import ast
import doctest
import re
from pathlib import Path

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from shardcore.domain.errors import RuleError
from shardcore.domain.layouts import path_keys, path_rules
from shardcore.domain.layouts.path_keys import METACHARACTERS, PathKey
from shardcore.domain.layouts.path_rules import Match, PathRules, RulesReport
from tests.unit.domain.layouts.drawn_paths import KEYS, PATHS, naive_match

RULES_MD = Path(__file__).parents[4] / "docs" / "reference" / "rules.md"


def test_a_pattern_given_as_the_path_finds_itself():
    keys = ["(key|query)/kernel", "(key|query)/weight"]  # as paths, these are two spellings of one
    rules = PathRules(zip(keys, range(2), strict=True))
    assert [rules.match(key).value for key in keys] == [0, 1]


def test_a_path_with_metacharacters_is_matched_exactly():
    assert PathRules({"conv+bn.weight": 1}).match("conv+bn/kernel") == Match(
        "conv+bn.weight", 1, "exact"
    )


def test_two_exact_keys_on_one_path_are_ambiguous():
    rules = PathRules({"dense/kernel": 1, "dense.weight": 2, ".*": 3})
    with pytest.raises(RuleError, match=r"'dense/kernel', 'dense\.weight'.*keep one"):
        rules.match("dense/kernel")


def test_several_patterns_on_one_path_say_how_to_choose():
    rules = PathRules({".*kernel": 1, ".*dense.*": 2, ".*bias": 3})
    with pytest.raises(RuleError) as caught:
        rules.match("dense/kernel")
    assert str(caught.value) == (
        "Path 'dense/kernel' matches multiple layout specification keys, and one at most may "
        "match: '.*kernel', '.*dense.*'. Make all but one narrower, or add a rule with the exact "
        "key 'dense/kernel'."
    )


def test_the_exact_key_wins_over_patterns():
    rules = PathRules({".*kernel": 1, ".*dense.*": 2, "dense.weight": 3})
    assert rules.match("dense/kernel") == Match("dense.weight", 3, "exact")


@pytest.mark.parametrize("character", r"\^$*+?{}[]()|")
def test_every_character_of_regular_expressions_makes_a_pattern(character):
    assert PathKey(f"a\\{character}").is_pattern
    assert not METACHARACTERS.isdisjoint(character)


@pytest.mark.parametrize("key", ["*dense", "(dense", "dense)", "dense[", "a{99999999999999999999}"])
def test_a_broken_pattern_is_refused_at_once(key):
    with pytest.raises(RuleError, match=r"not a valid regular expression.*Write") as caught:
        PathRules({key: None})
    assert repr(key) in str(caught.value)


@pytest.mark.parametrize("key", ["", None, 3, ("a", "b")])
def test_a_key_must_be_text(key):
    with pytest.raises(RuleError, match="non-empty string"):
        PathKey(key)


def test_a_key_given_twice_is_refused():
    with pytest.raises(RuleError, match="'a/b' is given twice: 1 and 2"):
        PathRules([("a/b", 1), ("a/b", 2)])


def test_rules_are_a_mapping_of_their_keys():
    rules = PathRules({".*kernel": 1, "dense/bias": 2})
    assert dict(rules) == {".*kernel": 1, "dense/bias": 2}
    assert len(rules) == 2
    with pytest.raises(KeyError):
        rules["dense.bias"]


def test_a_report_accounts_for_every_rule_and_path():
    rules = PathRules({".*dense.*kernel": 1, "norm/gamma": 2, "conv/kernel": 3})
    report = rules.report(["a/dense/kernel", "b.dense.weight", "norm/gamma", "norm/beta"])
    assert report.matched == {
        "a/dense/kernel": ".*dense.*kernel",
        "b.dense.weight": ".*dense.*kernel",
        "norm/gamma": "norm/gamma",
    }
    assert report.unused_rules == ("conv/kernel",)
    assert report.unmatched_paths == ("norm/beta",)


@given(st.lists(KEYS, max_size=4, unique=True), st.lists(PATHS, unique=True, max_size=4))
def test_a_report_loses_nothing_and_its_suggestions_work(keys, asked):
    expected = {path: naive_match(keys, path)[0] for path in asked}
    assume(all(len(found) <= 1 for found in expected.values()))
    report = PathRules.report(PathRules(dict.fromkeys(keys)), asked)
    assert {path: {key} for path, key in report.matched.items()} == {
        path: found for path, found in expected.items() if found
    }
    assert set(report.unmatched_paths) == {path for path in asked if not expected[path]}
    assert set(report.unused_rules) == set(keys) - set(report.matched.values())
    for text in report.hints.values():
        for meant in re.findall(r"did you mean ('.*')\? It", text):
            assert any(naive_match([ast.literal_eval(meant)], path)[0] for path in asked)


@pytest.mark.parametrize(
    ("key", "path", "hint"),
    [
        ("dense", "a/dense_1/kernel", "did you mean '.*dense.*'?"),
        ("dense.kernel", "a/dense/kernel", "did you mean '.*dense/kernel.*'?"),
        ("conv|dense", "a/dense/kernel", "did you mean '.*(conv|dense).*'?"),
        (".*dens.*krnel", "a/dense/kernel", "did you mean '.*dens.*kernel'?"),
        ("a.dense.weigth", "a/dense/kernel", "the closest path is 'a.dense.weight'"),
        (".*dens/kernel", "a/dense/kernel", "did you mean '.*dense/kernel'? It matches 'a/dense/k"),
        (".*Dense_1.*", "a/dense_1/kernel", "did you mean '.*dense_1.*'?"),
        ("a/dense/kernels", "a/dense/kernel", "the closest path is 'a/dense/kernel'"),
        ("(?i)DENSE", "zzzz", None),
    ],
)
def test_an_unused_rule_gets_the_hint_that_helps(key, path, hint):
    text = PathRules({key: None}).report([path]).hints.get(key)
    assert (text is None) if hint is None else hint in text


def test_the_report_names_a_rule_that_an_exact_key_overrules():
    report = PathRules({"a/kernel": 1, ".*kernel": 2}).report(["a/kernel"])
    assert report.hints == {".*kernel": "the exact key 'a/kernel' has precedence on 'a/kernel'"}


def test_a_report_prints_aligned():
    report = RulesReport(
        matched={"dense/kernel": ".*kernel", "a": "a"},
        unused_rules=("x", "longer"),
        unmatched_paths=("b",),
        hints={"x": "why"},
    )
    assert str(report) == (
        "Paths that a rule matched:\n"
        "  dense/kernel  .*kernel\n"
        "  a             a\n"
        "Rules that matched nothing:\n"
        "  x       why\n"
        "  longer\n"
        "Paths that no rule matched:\n"
        "  b"
    )
    assert str(RulesReport(matched={})) == "No rules and no paths."


def documented_examples():
    section = RULES_MD.read_text(encoding="utf-8").split("## Examples")[1].split("##")[0]
    return re.findall(r"^\| `(.+)` \| `(.+)` \| (exact|pattern|no) \|$", section, re.MULTILINE)


def test_the_documented_examples_are_all_read():
    section = RULES_MD.read_text(encoding="utf-8").split("## Examples")[1].split("##")[0]
    assert len(documented_examples()) == len(re.findall(r"^\| `", section, re.MULTILINE)) >= 20


@pytest.mark.parametrize(("key", "path", "how"), documented_examples())
def test_the_documented_examples_hold(key, path, how):
    match = PathRules({key.replace(r"\|", "|"): None}).match(path)
    assert (match.how if match else "no") == how


def test_the_documented_report_is_what_is_printed():
    result = doctest.testfile(str(RULES_MD), module_relative=False)
    assert (result.failed, result.attempted) == (0, 2)


@pytest.mark.parametrize("module", [path_keys, path_rules])
def test_docstring_examples_run(module):
    result = doctest.testmod(module)
    assert result.attempted > 0
    assert result.failed == 0
