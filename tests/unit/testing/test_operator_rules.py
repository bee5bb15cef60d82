"""`check_operator_rule` passes rules that hold, and names the factor of one that does not."""

import re

import pytest
import torch

import shardcore
from shardcore.adapters.engine.declared import rules as declared
from shardcore.domain.errors import ArgumentProblem, LayoutError, RuleError
from shardcore.testing import check_operator_rule
from tests import own_operators
from tests.own_operators import operator

LIBRARY = torch.library.Library("checked", "DEF")


def define(name, schema, function, rule):
    """An operator with a declared rule."""
    LIBRARY.define(f"{name}{schema}")
    LIBRARY.impl(name, function, "CompositeExplicitAutograd")
    made = getattr(torch.ops.checked, name).default
    shardcore.operator_rule(made, rule)
    return made


def windows(x):
    return x.unflatten(-1, (-1, 2)).amax(-1)


@pytest.fixture(scope="module", autouse=True)
def _declared():
    """Declares the rules for this module only: ranks of other tests declare their own."""
    before = dict(declared._RULES)
    own_operators.declare_all()
    yield
    declared._RULES.clear()
    declared._RULES.update(before)


HOLD = {
    "rows of a softmax": ("(Tensor x) -> Tensor", lambda x: x.softmax(-1), "n - -> n -", (6, 5)),
    "windows": ("(Tensor x) -> Tensor", windows, "n 2k -> n k", (4, 12)),
    "pairs of windows": ("(Tensor x) -> Tensor", windows, "n 4k -> n 2k", (4, 12)),
    "sum": ("(Tensor x) -> Tensor", lambda x: x.sum(0), "n k -> k", (5, 6)),
    "all": ("(Tensor x) -> Tensor", lambda x: x.sum(), "n k -> ()", (5, 6)),
    "two": ("(Tensor x) -> (Tensor, Tensor)", lambda x: (x * 2, x.sum(1)), "n k -> n k, n", (6, 7)),
    "halves": ("(Tensor x) -> Tensor", lambda x: x.flatten(), "a b -> a*b", (4, 6)),
}


@pytest.mark.parametrize("name", HOLD)
def test_a_rule_that_holds_passes(name):
    schema, function, rule, shape = HOLD[name]
    check_operator_rule(define(name.replace(" ", "_"), schema, function, rule), torch.randn(shape))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_rules_of_a_module_with_gradients_hold(dtype):
    def draw(*shape):
        return torch.randn(shape, dtype=dtype)

    check_operator_rule(operator("scale"), draw(6, 5), draw(5))
    check_operator_rule(operator("scale_backward"), draw(6, 5), draw(6, 5), draw(5))
    check_operator_rule(operator("project"), draw(6, 5), draw(5, 4), draw(4), by=2.0)
    check_operator_rule(operator("project"), draw(6, 5), draw(5, 4), None)
    check_operator_rule(operator("project_backward"), draw(6, 4), draw(6, 5), draw(5, 4), 2.0)


WRONG = {
    "softmax": (lambda x: x.softmax(-1), "n k -> n k", "k"),
    "mean": (lambda x: x.mean(0), "n k -> k", "n"),
    "largest": (lambda x: x.amax(1), "n k -> n", "k"),
    "running": (lambda x: x.cumsum(0), "n k -> n k", "n"),
    "squared_sum": (lambda x: x.sum(0) ** 2, "n k -> k", "n"),
    # It holds for two halves, and not in uneven parts.
    "neighbours": (lambda x: x + x.unflatten(1, (-1, 2)).flip(2).flatten(1), "n k -> n k", "k"),
    "count": (lambda x: x * len(x), "n k -> n k", "n"),
    "too_few": (lambda x: x[:, 7, None].clone(), "n k -> n -", "k"),  # it raises on shards
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_rule_names_its_factor(name):
    function, rule, factor = WRONG[name]
    made = define(f"wrong_{name}", "(Tensor x) -> Tensor", function, rule)
    with pytest.raises(RuleError, match=f"is wrong: if . ranks shard factor '{factor}'") as error:
        check_operator_rule(made, torch.randn(5, 8))
    assert error.value.name == factor
    assert f"wrong_{name}" in str(error.value)
    assert rule in str(error.value)


def test_two_factors_that_are_right_alone_are_named_together():
    def both(x):
        return x + float(x.shape == (2, 2))

    made = define("both", "(Tensor x) -> Tensor", both, "n k -> n k")
    with pytest.raises(RuleError, match="shard factor 'n' and 'k'"):
        check_operator_rule(made, torch.randn(4, 4))


def test_what_cannot_be_proved_is_refused():
    with pytest.raises(ArgumentProblem, match="an operator with a declared rule"):
        check_operator_rule(operator("softmax"), torch.randn(4, 4))
    with pytest.raises(ArgumentProblem, match="two steps or more of factor 'n'"):
        check_operator_rule(operator("scale"), torch.randn(1, 4), torch.randn(4))
    with pytest.raises(LayoutError, match=re.escape("operand 1 has shape (5,)")):
        check_operator_rule(operator("scale"), torch.randn(4, 4), torch.randn(5))
    shorter = define("shorter", "(Tensor x) -> Tensor", lambda x: x[1:], "n -> n")
    with pytest.raises(RuleError, match=re.escape("says that result 0 is 'n', and it has shape (")):
        check_operator_rule(shorter, torch.randn(6))
    drawn = define("drawn", "(Tensor x) -> Tensor", lambda x: x + torch.rand(1), "n -> n")
    with pytest.raises(ArgumentProblem, match="same results for the same operands"):
        check_operator_rule(drawn, torch.randn(6))


def test_values_that_are_no_numbers_are_compared():
    made = define("roots", "(Tensor x) -> Tensor", torch.sqrt, "n -> n")
    check_operator_rule(made, torch.tensor([1.0, -1.0, float("inf"), 4.0]))


def test_whole_numbers_and_truth_values_are_operands():
    made = define("chosen", "(Tensor m, Tensor i) -> Tensor", torch.logical_xor, "n, n -> n")
    check_operator_rule(made, torch.tensor([True, False, True, True]), torch.tensor([0, 1, 2, 0]))


def test_a_number_is_an_operand_too():
    scaled = ("(Tensor x, Tensor by) -> Tensor", lambda x, by: x * by)
    check_operator_rule(
        define("by_number", *scaled, "n k, () -> n k"), torch.randn(6, 5), torch.tensor(2.0)
    )


def test_small_values_hide_no_wrong_rule():
    made = define("centered", "(Tensor x) -> Tensor", lambda x: x - x.mean(0), "n k -> n k")
    with pytest.raises(RuleError):
        check_operator_rule(made, torch.randn(6, 5) * 1e-6)


def test_an_example_of_equal_values_is_refused():
    made = define("equal", "(Tensor x) -> Tensor", lambda x: x - x.mean(0), "n k -> n k")
    with pytest.raises(ArgumentProblem, match="values that differ in operand 0"):
        check_operator_rule(made, torch.ones(6, 5))
